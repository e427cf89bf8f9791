"""Is the final answer of a text right? Finding it, comparing it, and comparing it in a process that can be killed."""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Callable
from fractions import Fraction

from labeling.processes import Remote
from prm.env import load_attribute
from prm.errors import UsageError

RIGHT, WRONG, NO_ANSWER = "right", "wrong", "no answer"
LONGEST = 1000  # characters; a longer answer is none

_BOX = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])\s*")
_SAYS = re.compile(r"\banswer\s*(?:is|:|=)\s*:?|####|^\s*A:", re.IGNORECASE | re.MULTILINE)
_TEXT = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
_LAYOUT = re.compile(r"\\[,!; ]|\\left|\\right|\^\s*\{?\\circ\}?|\\?[%$]|[°€£*]|\\[()\[\]]")
_MINUS = str.maketrans(dict.fromkeys("\u2212\u2013\ufe63\uff0d", "-"))  # how typesetters write it
_NUMERAL = r"(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+\.?\d*|\.\d+)"
_FRACTION = r"\\[dt]?frac\s*(?:\{([^{}]+)\}|(\d))\s*(?:\{([^{}]+)\}|(\d))"
_LITERAL = re.compile(
    rf"(?P<sign>[-+]?)\s*(?:(?P<whole>\d+)\s*)?{_FRACTION}"
    rf"|(?P<sign2>[-+]?)\s*(?:(?P<whole2>\d+)\s+)?(?P<top>{_NUMERAL})\s*/\s*(?P<bottom>{_NUMERAL})"
    rf"|(?P<sign3>[-+]?)\s*(?P<plain>{_NUMERAL})(?:[eE](?P<power>[-+]?\d{{1,3}}))?"
)


def final_answer(text: str) -> str | None:
    r"""The last answer that a text commits itself to; None where there is none.

    Counted are `\boxed{...}` and `\fbox{...}` with balanced braces; "the answer is ...", "Answer: ..." and "#### ..."
    up to the end of the sentence or line; "A: NUMBER" at the start of a line; and a text that is but a number. The last
    one counts, so a text that corrects itself is taken at its last word; where that is cut off there is none.
    """
    boxes, says = list(_BOX.finditer(text)), list(_SAYS.finditer(text))
    said_at, said = -1, ""
    for match in reversed(says):
        said = _sentence(text[match.end() : match.end() + LONGEST])
        # After a box only a number counts as another answer, not "the answer is as above".
        loose = boxes or match[0].strip() == "A:"
        if said and not _BOX.match(said.lstrip("$*([\\ ")) and (not loose or number(said) is not None):
            said_at = match.start()
            break
    if boxes and boxes[-1].start() > said_at:
        return _braced(text, boxes[-1].end()) or None
    if said_at >= 0:
        return said
    bare = text.strip()
    return bare if number(bare) is not None and not re.search(r"(?<!\\)\b[a-zA-Z]{2,}", bare) else None


def exact(answer: str, gold: str) -> bool:
    """Equal as text, apart from case, spaces, dollar signs, final points and how a minus or a fraction is set."""
    return _plain(answer) == _plain(gold)


def numeric(answer: str, gold: str) -> bool:
    r"""Equal as rational numbers: 0.5, 1/2 and \frac{1}{2}; 1,000 and 1000; a unit after the number is passed over.

    A percentage equals both the number in front of the sign and a hundredth of it. Where neither side is a number they
    are compared as `exact` does.
    """
    a, b = number(answer), number(gold)
    if a is None and b is None:
        return exact(answer, gold)
    if a is None or b is None:
        return False
    if "%" in answer and "%" not in gold:
        return b in (a, a / 100)
    return a == b


def math_verify(answer: str, gold: str) -> bool:
    """Equal as mathematics, by the package `math-verify` (to be installed beside this one)."""
    try:
        from math_verify import parse, verify
    except ImportError:
        raise UsageError("the checker math-verify needs: pip install 'math-verify[antlr4_13_2]'") from None
    return bool(verify(parse(rf"\boxed{{{gold}}}"), parse(rf"\boxed{{{answer}}}")))


CHECKERS: dict[str, Callable[[str, str], bool]] = {"exact": exact, "numeric": numeric, "math-verify": math_verify}


def number(text: str) -> Fraction | None:
    """The rational number that a text denotes, with perhaps a variable before it ("x = 5") or a unit after it."""
    if len(text) > LONGEST:
        return None
    plain = _TEXT.sub(r" \1", text.translate(_MINUS)).replace("{,}", ",")
    plain = _LAYOUT.sub(" ", plain).strip().rstrip(".")
    plain = re.sub(r"^[a-zA-Z]\w?\s*=\s*", "", plain)
    match = _LITERAL.match(plain)
    if match is None or re.search(r"[\d\\=^]", plain[match.end() :]):
        return None
    sign = match["sign"] or match["sign2"] or match["sign3"]
    if match["plain"] is not None:
        value: Fraction | None = _ratio(match["plain"]) * Fraction(10) ** int(match["power"] or 0)
    else:
        groups = match.groups()
        top = match["top"] or groups[2] or groups[3]
        bottom = match["bottom"] or groups[4] or groups[5]
        value = _divided(top, bottom, match["whole"] or match["whole2"])
    return value if value is None or sign != "-" else -value


def judge(text: str, gold: str, checker: Callable[[str, str], bool] = numeric) -> str:
    """"right", "wrong" or "no answer"."""
    answer = final_answer(text)
    if answer is None:
        return NO_ANSWER
    return RIGHT if checker(answer, gold) else WRONG


class Checker:
    """A checker in a process of its own, which is killed when it takes longer than `timeout` seconds.

    Args:
        name: one of `CHECKERS`, or `module:attribute`, a function (answer, gold) -> bool.

    Raises:
        UsageError: there is none of that name.
    """

    def __init__(self, name: str, timeout: float = 10.0) -> None:
        if name not in CHECKERS and ":" not in name:
            raise UsageError(f"checker {name!r}: expected {', '.join(CHECKERS)} or module:attribute")
        self._remote = Remote(functools.partial(_Called, name), timeout)
        self._lock = threading.Lock()

    def __call__(self, answer: str, gold: str) -> bool:
        """Whether the answer is right. Raises RemoteError where the checker raises, crashes or hangs."""
        with self._lock:
            return bool(self._remote.call("check", answer, gold))


class _Called:
    """What lives in the checker's process."""

    def __init__(self, name: str) -> None:
        self.check = CHECKERS[name] if name in CHECKERS else load_attribute(name)


@functools.cache
def shared_checker(name: str, timeout: float) -> Checker:
    """One process for all who ask for the same checker; it keeps nothing between calls."""
    return Checker(name, timeout)


def _braced(text: str, at: int) -> str | None:
    """The content of the braces that open at `at` (or the one token there); None where they do not close."""
    if text[at : at + 1] != "{":
        token = re.match(r"[^\s${}\\]+", text[at:])
        return token[0].rstrip(".,;") if token else None
    depth = 0
    for i in range(at, len(text)):
        if text[i - 1] != "\\":
            depth += {"{": 1, "}": -1}.get(text[i], 0)
        if depth == 0:
            return text[at + 1 : i].strip()
    return None


def _sentence(text: str) -> str:
    """What is said up to the end of the line or sentence, without markup around it."""
    line = text.lstrip().split("\n", 1)[0]
    said = re.split(r"[.;!?](?:\s|$)", line, maxsplit=1)[0]
    return said.strip(" \t*$:").removeprefix("\\(").removesuffix("\\)").strip(" \t*$")


def _plain(text: str) -> str:
    plain = _TEXT.sub(r"\1", text.translate(_MINUS)).replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")
    plain = re.sub(r"\\left|\\right|\\[,!; ]|\$", "", plain)
    return re.sub(r"\s+", "", plain).rstrip(".").casefold()


def _ratio(numeral: str) -> Fraction:
    return Fraction(numeral.replace(",", "").rstrip(".") or "0")


def _divided(top: str, bottom: str, whole: str | None) -> Fraction | None:
    a, b = number(top), number(bottom)
    if a is None or not b:
        return None
    return Fraction(whole or 0) + a / b
