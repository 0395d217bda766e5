"""PostgreSQL's own parse tree (`pg_node_tree`) as values: nodes, lists and words. Pure.

`{TAG :field value …}` is a node, `( … )` a list, `<>` nothing, and all else a word, in which a backslash guards the
character behind it. A constant's bytes stand in brackets.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import msgspec

_TOKEN = re.compile(r"[(){}]|(?:\\.|[^\s(){}\\])+", re.DOTALL)
_GUARDED = re.compile(r"\\(.)", re.DOTALL)
MAX_DEPTH = 400

Item = Any  # a Node, a list of items, a word, or None


class Unreadable(Exception):
    """This is no tree, or not one that is understood."""


class Node(msgspec.Struct, frozen=True):
    """One node: its tag, and its fields by name."""

    tag: str
    fields: dict[str, Item]

    def __getitem__(self, name: str) -> Item:
        try:
            return self.fields[name]
        except KeyError:
            raise Unreadable(f"{self.tag} has no {name}") from None

    def number(self, name: str) -> int:
        """A field that is a number."""
        try:
            return int(self[name])
        except (TypeError, ValueError):
            raise Unreadable(f"{name} of {self.tag} is no number") from None

    def items(self, name: str) -> list[Item]:
        """A field that is a list, or nothing."""
        found = self[name]
        if found is None:
            return []
        if not isinstance(found, list):
            raise Unreadable(f"{name} of {self.tag} is no list")
        return found

    def numbers(self, name: str) -> list[int]:
        """A field that is a list of numbers: `(o 23 25)`."""
        return [int(word) for word in self.items(name)[1:]]

    def is_true(self, name: str) -> bool:
        """A field that is true or false."""
        return bool(self[name] == "true")


def parse(text: str) -> Item:
    """The tree that is written in `text`."""
    tokens = _TOKEN.findall(text)
    found, at = _item(tokens, 0, 0)
    if at != len(tokens):
        raise Unreadable("something stands behind the tree")
    return found


def _item(tokens: list[str], at: int, depth: int) -> tuple[Item, int]:
    if at >= len(tokens) or depth > MAX_DEPTH:
        raise Unreadable("the tree has no end")
    token = tokens[at]
    if token == "{":
        return _node(tokens, at + 1, depth + 1)
    if token == "(":
        made: list[Item] = []
        at += 1
        while tokens[at : at + 1] != [")"]:
            item, at = _item(tokens, at, depth + 1)
            made.append(item)
        return made, at + 1
    if token in ")}":
        raise Unreadable("a bracket too many")
    return None if token == "<>" else _GUARDED.sub(r"\1", token), at + 1


def _node(tokens: list[str], at: int, depth: int) -> tuple[Node, int]:
    if at >= len(tokens) or tokens[at] in "(){}":
        raise Unreadable("a node without a tag")
    tag, at = tokens[at], at + 1
    fields: dict[str, Item] = {}
    while tokens[at : at + 1] != ["}"]:
        if at >= len(tokens) or tokens[at][0] != ":":
            raise Unreadable(f"{tag} is not written in fields")
        name, at = tokens[at][1:], at + 1
        value, at = _item(tokens, at, depth)
        if tokens[at : at + 1] == ["["]:
            end = tokens.index("]", at)
            value, at = bytes(int(byte) & 255 for byte in tokens[at + 1 : end]), end + 1
        fields[name] = value
    return Node(tag, fields), at + 1


def below(item: Item) -> Iterator[Node]:
    """Every node of a tree, those above first."""
    if isinstance(item, Node):
        yield item
        for value in item.fields.values():
            yield from below(value)
    elif isinstance(item, list):
        for each in item:
            yield from below(each)
