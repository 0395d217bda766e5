"""PostgreSQL's own parse tree (`pg_node_tree`) as values: nodes, lists and words. Pure.

`{TAG :field value …}` is a node, `( … )` a list, `<>` nothing, and anything else a word, in which a backslash escapes
the next character. A constant's bytes are in square brackets.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import msgspec

_TOKEN = re.compile(r"[(){}]|(?:\\.|[^\s(){}\\])+", re.DOTALL)
_GUARDED = re.compile(r"\\(.)", re.DOTALL)
_MARKS = frozenset({"", "(", ")", "{", "}"})
_NO_ITEM = frozenset({"", ")", "}"})
_PLAIN: dict[str, None] = {"<>": None}
MAX_DEPTH = 400

Item = Any  # a Node, a list of items, a word, or None


class UnsupportedTree(Exception):
    """A parse tree of PostgreSQL that is malformed or has a node we do not analyse: its answers are then not cached."""


class Node(msgspec.Struct, frozen=True):
    """A node: its tag, and its fields by name."""

    tag: str
    fields: dict[str, Item]

    def __getitem__(self, name: str) -> Item:
        try:
            return self.fields[name]
        except KeyError:
            raise UnsupportedTree(f"{self.tag} has no {name}") from None

    def number(self, name: str) -> int:
        """Return the field `name` as an integer; UnsupportedTree if it is not one."""
        try:
            return int(self[name])
        except (TypeError, ValueError):
            raise UnsupportedTree(f"{name} of {self.tag} is no number") from None

    def items(self, name: str) -> list[Item]:
        """Return the field `name`, a list; [] if it is empty, UnsupportedTree if it is not a list."""
        found = self[name]
        if found is None:
            return []
        if not isinstance(found, list):
            raise UnsupportedTree(f"{name} of {self.tag} is no list")
        return found

    def numbers(self, name: str) -> list[int]:
        """Return the field `name`, a list of numbers such as `(o 23 25)`."""
        return [int(word) for word in self.items(name)[1:]]

    def is_true(self, name: str) -> bool:
        """Return the field `name` as a bool."""
        return bool(self[name] == "true")


def parse(text: str) -> Item:
    """Return the tree that `text` contains; raise UnsupportedTree if it is malformed or too deep."""
    tokens = iter(_TOKEN.findall(text))
    found = _item(next(tokens, ""), tokens, 0)
    if next(tokens, None) is not None:
        raise UnsupportedTree("text follows the end of the tree")
    return found


def _item(token: str, tokens: Iterator[str], depth: int) -> Item:
    """Return the item that begins with `token`."""
    if token == "{":
        return _node(tokens, depth + 1)
    if token == "(":
        return _list(tokens, depth + 1)
    if token in _NO_ITEM:
        raise UnsupportedTree("a bracket is closed that was not opened" if token else "the tree has no end")
    return _word(token)


def _word(token: str) -> str | None:
    if token == "<>":
        return None
    return _GUARDED.sub(r"\1", token) if "\\" in token else token


def _list(tokens: Iterator[str], depth: int) -> list[Item]:
    if depth > MAX_DEPTH:
        raise UnsupportedTree(f"the tree is nested deeper than {MAX_DEPTH}")
    made: list[Item] = []
    for token in tokens:
        if token == ")":
            return made
        made.append(_item(token, tokens, depth))
    raise UnsupportedTree("the tree has no end")


def _node(tokens: Iterator[str], depth: int) -> Node:
    tag = next(tokens, "")
    if depth > MAX_DEPTH:
        raise UnsupportedTree(f"the tree is nested deeper than {MAX_DEPTH}")
    if tag in _MARKS:
        raise UnsupportedTree("a node has no tag")
    fields: dict[str, Item] = {}
    name = ""
    for token in tokens:
        if token == "}":
            return Node(tag, fields)
        if token == "[" and name:  # after the length of a constant
            fields[name] = _bytes(tokens)
            continue
        if token[0] != ":":
            raise UnsupportedTree(f"{tag} is not followed by fields")
        name = token[1:]
        value = next(tokens, "")
        fields[name] = _item(value, tokens, depth) if value in _MARKS or "\\" in value else _PLAIN.get(value, value)
    raise UnsupportedTree("the tree has no end")


def _bytes(tokens: Iterator[str]) -> bytes:
    made = bytearray()
    for token in tokens:
        if token == "]":
            return bytes(made)
        try:
            made.append(int(token) & 255)
        except ValueError:
            raise UnsupportedTree("a constant is not written in bytes") from None
    raise UnsupportedTree("the tree has no end")


def below(item: Item) -> Iterator[Node]:
    """Yield every node of a tree, parents first."""
    if isinstance(item, Node):
        yield item
        for value in item.fields.values():
            yield from below(value)
    elif isinstance(item, list):
        for each in item:
            yield from below(each)
