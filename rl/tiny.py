"""A tiny policy made on the spot: a byte-level BPE of its own and a few layers. For demos and tests, not for use."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def tiny_tokenizer(texts: Iterable[str], vocabulary: int = 2048) -> Any:
    """A byte-level BPE tokenizer trained on `texts`, with the special tokens <bos>, <eos> and <pad>.

    A run of capitalised words counts as one word, so that with enough vocabulary a name is one token to copy.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    words = Regex(r"\n+| ?\p{Lu}[^\s.:?]*(?: \p{Lu}[^\s.:?]*)*| ?[^\s\p{Lu}.:?]+| ?[.:?]|\s+")
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(words, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["<bos>", "<eos>", "<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>"
    )


def tiny_model(tokenizer: Any, *, width: int = 128, layers: int = 4, context: int = 1024, seed: int = 0) -> Any:
    """A randomly initialised Llama of the given width and depth (4 heads), for this tokenizer.

    Embeddings start larger than usual (deviation 0.15), so that rare names are told apart from the first update on.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=width * 3,
        num_hidden_layers=layers,
        num_attention_heads=4,
        max_position_embeddings=context,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
        torch.nn.init.normal_(model.model.embed_tokens.weight, std=0.15)
        return model


def teach_copying(model: Any, updates: int, *, lr: float = 3e-3, seed: int = 0) -> None:
    """Train a fresh model to quote: random tokens, then pieces of them again. It then learns a task of look-ups faster.

    A batch is 32 rows of 20 random tokens and 5 quotes of 5 of them; the loss is on the quotes after their first token.
    """
    import torch

    from prm.config import progress

    generator = torch.Generator().manual_seed(seed)
    optimiser = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98))
    bar = progress(updates, "learning to quote", "update")
    for update in range(updates):
        first = torch.randint(3, model.config.vocab_size, (32, 20), generator=generator)
        starts = torch.randint(0, 15, (5, 32, 1), generator=generator)
        quotes = [first.gather(1, start + torch.arange(5)) for start in starts]
        ids = torch.cat([first, *quotes], 1)
        learned = torch.zeros_like(ids, dtype=torch.bool)
        learned[:, 20:] = (torch.arange(25) % 5 > 0)[None]
        hidden = model.model(input_ids=ids).last_hidden_state[:, :-1][learned[:, 1:]]
        loss = torch.nn.functional.cross_entropy(model.lm_head(hidden), ids[:, 1:][learned[:, 1:]])
        optimiser.param_groups[0]["lr"] = lr * min(1.0, (update + 1) / 30)
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        bar.update()
    bar.close()
