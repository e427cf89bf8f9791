"""Tiny tokenizers and models, made in well under a second, for any test."""

from functools import cache

import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

CORPUS = [
    "Add the two numbers.\n\nso x = 2\n\n\\frac{3}{4}.\n\nf(4)\n\n\\[ y=1 \\]\n",
    "Task: what is the capital of France?\n\nStep: search: capital of France\n\nResult: Paris is the capital.\n\n",
    "answer: Paris. The river of the country is long.\n\nStep: search: river\n\nResult: none (of 4)\n\n",
    "Он и они идут. user assistant tool system think\n",
] * 3
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHATML = (
    "{% if tools %}<|im_start|>system\nTools: {{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOKENIZERS = ("byte-bpe", "unigram", "byte-fallback")


@cache
def tokenizer(kind: str = "byte-bpe") -> PreTrainedTokenizerFast:
    """One of `TOKENIZERS`; shared, so copy it (copy.deepcopy) before changing it.

    byte-bpe: as Qwen's and GPT-4's, punctuation merges with newlines, ChatML template, no BOS.
    unigram: as T5's and XLM-R's, a blank becomes a piece's first character; adds a BOS.
    byte-fallback: as Llama 2's, BPE on characters, bytes for what is unknown; adds a BOS.
    """
    return {"byte-bpe": _byte_bpe, "unigram": _unigram, "byte-fallback": _byte_fallback}[kind]()


def model(
    tokenizer_: PreTrainedTokenizerFast | None = None, *, kind: str = "llama", seed: int = 0, rows: int = 0, init=0.3
):
    """A random causal language model of width 32 with 2 layers ("llama" or "qwen2"), `rows` of embedding at least.

    `init` is the spread of the weights: large, so that outputs differ visibly; what is to learn starts nearer 0.02.
    """
    own = tokenizer_ or tokenizer()
    config, cls = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen2": (Qwen2Config, Qwen2ForCausalLM)}[kind]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        made = cls(
            config(
                vocab_size=max(len(own), rows),
                hidden_size=32,
                intermediate_size=64,
                num_hidden_layers=2,
                num_attention_heads=2,
                num_key_value_heads=2,
                max_position_embeddings=2048,
                initializer_range=init,
                bos_token_id=own.bos_token_id,
                eos_token_id=own.eos_token_id,
                pad_token_id=own.pad_token_id,
            )
        )
    return made.eval()


def checkpoint(folder, tokenizer_: PreTrainedTokenizerFast | None = None, **options) -> str:
    """Write a tiny causal language model with its tokenizer; the folder's name."""
    own = tokenizer_ or tokenizer()
    model(own, **options).save_pretrained(folder)
    own.save_pretrained(folder)
    return str(folder)


def _byte_bpe() -> PreTrainedTokenizerFast:
    made = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(SPLIT), "isolated")
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    made.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(vocab_size=420, special_tokens=special, initial_alphabet=alphabet, show_progress=False),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHATML,
        additional_special_tokens=["<|im_start|>"],
    )


def _unigram() -> PreTrainedTokenizerFast:
    made = Tokenizer(models.Unigram())
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    special = ["<s>", "</s>", "<unk>", "<pad>"]
    made.train_from_iterator(
        CORPUS, trainers.UnigramTrainer(vocab_size=180, special_tokens=special, unk_token="<unk>", show_progress=False)
    )
    return _with_bos(made)


def _byte_fallback() -> PreTrainedTokenizerFast:
    made = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    special = ["<s>", "</s>", "<unk>", "<pad>", *(f"<0x{i:02X}>" for i in range(256))]
    made.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=420, special_tokens=special, show_progress=False))
    return _with_bos(made)


def _with_bos(made: Tokenizer) -> PreTrainedTokenizerFast:
    bos = made.token_to_id("<s>")
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    return PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="<pad>"
    )
