"""Inductor's files are named after their graph, and their kernels counted."""

from __future__ import annotations

from pathlib import Path

from scripts.explain.compiler import kernels_in, name_of

CODE = """\
# AOT ID: ['3_backward']
cpp_fused_add_0 = async_compile.cpp_pybinding(['float*'], r'''
''')
triton_poi_fused_1 = async_compile.triton('triton_poi_fused_1', '''
''')
extern_kernels.mm(a, b, out=c)
"""


def test_a_file_is_named_after_its_graph_and_its_kernels_are_counted(tmp_path: Path) -> None:
    file = tmp_path / "cabcdefghijkl.py"
    file.write_text(CODE)
    assert name_of(file) == "3_backward-cabcdefg.py"
    assert kernels_in(file) == 2


def test_a_file_that_does_not_say_keeps_its_name(tmp_path: Path) -> None:
    file = tmp_path / "other.py"
    file.write_text("")
    assert (name_of(file), kernels_in(file)) == ("other.py", 0)
