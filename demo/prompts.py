"""Prompts for the demo pair, and for pairs trained on more: code and prose cut from held-out text,
and word problems of our own.

The same Python installation always gives the same prompts. Nothing here imports torch.
"""

from __future__ import annotations

import ast
import hashlib
import itertools
import random
import re
from collections.abc import Sequence
from functools import cache
from typing import TypedDict

from spectune.demo.corpus import CATEGORIES, Document, code_documents, parse, prose_documents

PROMPTS_PER_CATEGORY = 100

# Characters, as no tokenizer is at hand here; the demo pair's takes 3 to 4 of them a token.
_CODE_CHARS = (240, 620)
_PROSE_CHARS = (140, 480)
_MIN_BODY_LINES = 4
# Held out, but much of it stands in a module that is not (_py_abc.py).
_REPEATED = frozenset({"abc.py"})


class Prompt(TypedDict):
    """One request of a workload."""

    id: str
    category: str
    turns: list[str]


@cache
def demo_workload() -> tuple[Prompt, ...]:
    """The demo's prompts, cut from the standard library."""
    return make_prompts(code_documents(True), prose_documents(True))


def make_prompts(code: Sequence[Document], prose: Sequence[Document]) -> tuple[Prompt, ...]:
    """Prompts cut from held-out documents, the categories in turn (code, prose, math, code, ...),
    so that any prefix is balanced: a hundred of each, or as many as the smallest category has."""
    columns = {
        "code": code_prompts(code),
        "prose": _prose_prompts(prose),
        "math": [*_math_prompts()],
    }
    count = min(PROMPTS_PER_CATEGORY, *(len(texts) for texts in columns.values()))
    return tuple(
        Prompt(id=f"{category}-{index:03d}", category=category, turns=[columns[category][index]])
        for index in range(count)
        for category in CATEGORIES
    )


def _mixed(groups: dict[str, list[str]]) -> list[str]:
    """The groups' texts, one of each in turn, so that no large module crowds out the others; no
    text twice.

    A group's name is its documents' key; what training text repeats is left out.
    """

    def rank(text: str) -> bytes:
        return hashlib.sha256(text.encode()).digest()

    queues = [
        sorted(set(groups[key]), key=rank) for key in sorted(groups.keys() - _REPEATED, key=rank)
    ]
    longest = max((len(queue) for queue in queues), default=0)
    texts = [queue[turn] for turn in range(longest) for queue in queues if turn < len(queue)]
    return list(dict.fromkeys(texts))


def code_prompts(documents: Sequence[Document]) -> list[str]:
    """Module text that ends with a function's header and, where it has one, docstring."""
    return _mixed({document.key: _code_cuts(document.text) for document in documents})


def _code_cuts(text: str) -> list[str]:
    tree = parse(text)
    if tree is None:
        return []
    lines = text.split("\n")
    cuts = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.end_lineno is None:
            continue
        has_docstring = ast.get_docstring(node, clean=False) is not None
        first = node.body[0]
        # Without a docstring the prompt stops before the body's first line, wherever a comment
        # makes it begin.
        stop = (first.end_lineno or first.lineno) if has_docstring else first.lineno - 1
        if node.end_lineno - stop < _MIN_BODY_LINES or stop < node.lineno:
            continue
        start = _context_start(lines, node.lineno - 1, stop)
        cut = "\n".join(lines[start:stop]).strip("\n")
        if _CODE_CHARS[0] <= len(cut) <= _CODE_CHARS[1] and cut.isascii():
            cuts.append(cut)
    return cuts


def _context_start(lines: list[str], header: int, stop: int) -> int:
    """The line at which a prompt up to `stop` begins: as early as fits, yet after a blank line
    where one allows it.

    The size aimed at differs from function to function, so that prompts are short and long.
    """
    shortest, longest = _CODE_CHARS
    limit = shortest + 80 + sum(map(ord, lines[header])) * 37 % (longest - shortest - 80)
    start, size, after_blank = header, sum(len(line) + 1 for line in lines[header:stop]), header
    while start > 0 and size + len(lines[start - 1]) + 1 <= limit:
        start -= 1
        size += len(lines[start]) + 1
        if not lines[start].strip() and size > shortest:
            after_blank = start
    return after_blank if after_blank < header else start


def _prose_prompts(documents: Sequence[Document]) -> list[str]:
    """Beginnings of docstrings and help topics, and of later paragraphs of the long ones."""
    groups: dict[str, list[str]] = {}
    for document in documents:
        groups.setdefault(document.key, []).extend(_prose_cuts(document.text))
    return _mixed(groups)


def _prose_cuts(text: str) -> list[str]:
    """Prompts from the paragraphs of a text that lie well apart."""
    shortest, longest = _PROSE_CHARS
    starts = [0]
    for gap in re.finditer(r"\n\n(?=\S)", text):
        if gap.end() - starts[-1] >= longest * 3 // 2:
            starts.append(gap.end())
    cuts = []
    for start in starts:
        rest = text[start:]
        # A little more than half of what there is, up to the end of a word, so that there is
        # something to go on to.
        size = min(longest, len(rest) * 3 // 5)
        match = re.match(rf"(?s).{{0,{size}}}(?<=\S)(?=\s)", rest)
        cut = match.group().strip("\n") if match else ""
        if len(cut) >= shortest and cut.isascii():
            cuts.append(cut)
    return cuts


_NAMES = (
    "Amara", "Boris", "Chiara", "Dmitri", "Elif", "Femi", "Greta", "Hiro", "Ingrid", "Jamal",
    "Keiko", "Lucas", "Mina", "Nadia", "Oscar", "Priya", "Quentin", "Rosa", "Samir", "Tove", "Usha",
    "Viktor", "Wanda", "Yusuf",
)  # fmt: skip
_THINGS = (
    "apples", "pencils", "stickers", "marbles", "postcards", "buttons", "muffins", "seashells",
    "cards", "beads",
)  # fmt: skip
_PLACES = (
    "bakery", "library", "garden centre", "toy shop", "market", "museum shop", "bookshop",
    "school fair",
)  # fmt: skip

# {a} to {e}, {p} and {q} are numbers that come out even, {x} and {y} names, {thing} and {place}
# nouns.
_TEMPLATES = (
    "{x} has {a} {thing} and buys {b} more at the {place}. Then {x} gives {c} of them to {y}. "
    "How many {thing} does {x} have left?",
    "A {place} sells {thing} in boxes of {b}. {x} buys {c} boxes and {y} buys {d} boxes. "
    "How many {thing} do they have altogether?",
    "{x} reads {b} pages of a book every day. The book has {p} pages. How many days does {x} need "
    "to finish it?",
    "{x} earns ${a} an hour at the {place} and works {c} hours a day, {d} days a week. How much "
    "does {x} earn in a week?",
    "There are {c} shelves in a {place}. Each shelf holds {b} {thing}. If {d} {thing} are taken "
    "away, how many {thing} remain?",
    "{x} is {c} years older than {y}. {y} is {a} years old. How old will {x} be in {d} years?",
    "A train travels {a} miles in an hour. How many miles does it travel in {c} hours if it stands "
    "still for one of those hours?",
    "{x} and {y} pick {thing} together. {x} picks {a} and {y} picks twice as many. How many "
    "{thing} do they pick in total?",
    "{x} wants to save ${p}. Every week {x} saves ${b}. After how many weeks has {x} saved enough?",
    "A box holds {b} {thing}. {x} fills {c} boxes and has {d} {thing} left over. How many {thing} "
    "did {x} have at first?",
    "{x} bakes {a} muffins in the morning and half as many in the afternoon. "
    "{x} sells them at the {place} for ${c} each. How much money does {x} make?",
    "A rope is {p} feet long. {x} cuts it into {b} equal pieces and gives {y} one piece. How many "
    "feet of rope does {x} keep?",
    "{x} runs {c} miles on each weekday and {d} miles on each day of the weekend. How many miles "
    "does {x} run in a week?",
    "Tickets for a play cost ${a} for adults and ${c} for children. {x}'s family buys {d} adult "
    "tickets and {e} children's tickets. How much do they pay?",
    "{x} shares {p} {thing} equally among {b} friends. {y}, one of them, already had {a} {thing}. "
    "How many {thing} does {y} have now?",
    "A farmer has {c} rows of {b} tomato plants. Each plant gives {d} tomatoes. How many tomatoes "
    "does the farmer get?",
    "{x} had ${q}. {x} spent ${a} on {thing} at the {place} and a third of the rest on lunch. How "
    "much money does {x} have now?",
    "A bus starts with {a} people. At the first stop {c} people get off and {b} get on. "
    "At the second stop {d} people get off. How many people are on the bus now?",
    "{x} makes bracelets from {b} beads each. With {p} beads, how many bracelets can {x} make, "
    "and how much does {x} earn by selling all of them for ${c} each?",
    "{x} plants {c} trees a day. {y} plants {d} more trees a day than {x}. How many trees do they "
    "plant together in {e} days?",
    "A tank holds {q} gallons of water. {x} uses {c} gallons each day to water the garden. "
    "How many gallons are left after {e} days?",
    "{x} buys {c} notebooks for ${d} each and {e} pens for $2 each. {x} pays with a $100 bill. How "
    "much change does {x} get?",
    "In a class of {a} students, {c} play chess and {d} play the piano. Nobody does both. How many "
    "students do neither?",
    "{x} walks {c} blocks to the {place} and back every day. How many blocks does {x} walk in "
    "{e} weeks?",
    "A printer prints {b} pages in a minute. How many minutes does it take to print {p} pages, "
    "and how many pages does it print in an hour?",
)


@cache
def prompt_sources() -> dict[str, str]:
    """What each prompt that can be cut from the standard library's held-out text is cut from: the
    key of a module or topic, or a word problem's template."""
    sources = dict(_math_prompts())
    for cuts, documents in ((_code_cuts, code_documents), (_prose_cuts, prose_documents)):
        sources |= {cut: d.key for d in documents(True) for cut in cuts(d.text)}
    return sources


@cache
def _math_prompts() -> dict[str, str]:
    """Word problems in the shape of the training text, with their templates; our own, with names
    and numbers drawn from a fixed seed."""
    draw = random.Random(20)
    prompts: dict[str, str] = {}
    for template in itertools.cycle(_TEMPLATES):
        if len(prompts) == PROMPTS_PER_CATEGORY:
            break
        x, y = draw.sample(_NAMES, 2)
        b, c, d, e = draw.randint(4, 12), draw.randint(3, 9), draw.randint(2, 8), draw.randint(2, 5)
        a = 2 * draw.randint(10, 30)
        # What a template divides comes out even: p by b, a by 2, q - a by 3; q covers c a day for e
        # days.
        p, q = b * draw.randint(5, 20), a + 3 * c * e
        thing, place = draw.choice(_THINGS), draw.choice(_PLACES)
        question = template.format(
            x=x, y=y, a=a, b=b, c=c, d=d, e=e, p=p, q=q, thing=thing, place=place
        )
        prompts[f"Question: {question}\nAnswer:"] = template
    return prompts
