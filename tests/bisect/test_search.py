"""The search itself, on trees of names: what it finds, and that it tries no set twice."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from scripts.bisect.search import Node, Outcome, Report, Search


def node(path: str, *children: Node, kind: str | None = None) -> Node:
    return Node(path=path, about=kind or path, children=list(children))


def search(regions: Sequence[Node], differs: Callable[[set[str]], bool]) -> tuple[Report, list[frozenset[str]]]:
    tried: list[frozenset[str]] = []

    def trial(paths: Sequence[str]) -> Outcome:
        tried.append(frozenset(paths))
        return Outcome(differs=differs(set(paths)), reason="planted" if differs(set(paths)) else None)

    found = Search(list(regions), trial).run()
    assert len(tried) == len(set(tried)), "no set is tried twice"
    return found, tried


def holding(*culprits: str) -> Callable[[set[str]], bool]:
    """Shows wherever one of the culprits is compiled, by itself or in what holds it."""
    return lambda paths: any(one == path or one.startswith(f"{path}.") for one in culprits for path in paths)


def culprit_of(found: Report) -> str | None:
    return found.culprit and found.culprit.path


NET = node("net", node("net.a", node("net.a.x"), node("net.a.y")), node("net.b"), node("net.c"))


def test_one_culprit_and_all_the_rest() -> None:
    found, _ = search([NET], holding("net.a.y"))
    assert culprit_of(found) == "net.a.y"
    assert found.rest == ["net.a.x", "net.b", "net.c"]
    assert found.rest_is_clean


def test_of_several_culprits_one_is_found_and_the_rest_still_differs() -> None:
    found, _ = search([NET], holding("net.a.y", "net.c"))
    assert culprit_of(found) == "net.a.y"
    assert found.rest == ["net.a.x", "net.b", "net.c"]
    assert not found.rest_is_clean


def test_a_module_whose_children_are_fine_is_at_fault_itself() -> None:
    found, _ = search([NET], lambda paths: bool(paths & {"net", "net.a"}))
    assert culprit_of(found) == "net.a"
    assert found.rest == ["net.a.x", "net.a.y", "net.b", "net.c"]


def test_what_shows_only_together_is_told_as_such() -> None:
    found, _ = search([node("net.b"), node("net.c")], lambda paths: {"net.b", "net.c"} <= paths)
    assert (found.whole.differs, found.culprit, found.rest) == (True, None, [])
    found, _ = search([NET], lambda paths: bool(paths & {"net"}) or {"net.b", "net.c"} <= paths)
    assert culprit_of(found) == "net", "its code, or its parts in one graph"
    assert found.rest == ["net.a", "net.b", "net.c"]
    assert not found.rest_is_clean


def test_one_of_many_alike_is_found_in_few_trials() -> None:
    net = node("net", *(node(f"net.{number}", kind="Block") for number in range(64)))
    found, tried = search([net], holding("net.37"))
    assert culprit_of(found) == "net.37"
    assert found.copies == []
    assert len(tried) < 20


@pytest.mark.parametrize("count", [2, 12])
def test_copies_that_show_it_too_are_left_out_of_the_rest(count: int) -> None:
    paths = [f"net.{number}" for number in range(count)]
    net = node("net", node("net.head"), *(node(path, kind="Block") for path in paths))
    found, tried = search([net], holding(*paths))
    assert (culprit_of(found), found.copies) == (paths[0], paths[1:])
    assert found.rest == ["net.head"]
    assert len(tried) < 10
