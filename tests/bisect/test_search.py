"""What is read from a tree of looks: the smallest at fault, the rest, and what was not compared."""

from __future__ import annotations

from scripts.bisect.search import ComparedModule, Report


def look(path: str, *children: ComparedModule, wrong: str | None = None, skipped: str | None = None) -> ComparedModule:
    return ComparedModule(path=path, wrong=wrong, skipped=skipped, children=list(children))


def report(*looks: ComparedModule) -> Report:
    return Report(looks=list(looks), batch="float32 4 x 8", batches=1)


def paths(looks: list[ComparedModule]) -> list[str]:
    return [one.path for one in looks]


def test_the_smallest_at_fault_and_all_the_rest() -> None:
    inner = look("net.a", look("net.a.x"), look("net.a.y", wrong="off"), wrong="off")
    found = report(look("net", inner, look("net.b"), wrong="off"), look("other"))
    assert paths(found.culprits) == ["net.a.y"]
    assert found.equal_modules == ["net.a.x", "net.b", "other"]


def test_several_culprits_are_found() -> None:
    found = report(look("net", look("net.a", wrong="off"), look("net.b"), look("net.c", wrong="off"), wrong="off"))
    assert paths(found.culprits) == ["net.a", "net.c"]


def test_a_module_whose_children_are_fine_is_at_fault_itself() -> None:
    found = report(look("net", look("net.a"), look("net.b"), wrong="off"))
    assert paths(found.culprits) == ["net"]
    assert found.equal_modules == ["net.a", "net.b"]


def test_what_was_not_compared_is_neither_equal_nor_at_fault() -> None:
    found = report(look("net", look("net.a", skipped="a generator"), look("net.b"), skipped="a generator"))
    assert (found.culprits, found.equal_modules) == ([], ["net.b"])
    assert paths(found.not_compared) == ["net.a"]
