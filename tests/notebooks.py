"""Notebooks of the tutorials: written from the scripts, compared with them, run.

``python -m tests.notebooks`` writes ``tutorials/notebooks/NAME.ipynb`` of each
``tutorials/NAME.py``, with the stored outputs of cells that did not change. ``--check`` writes
nothing, and fails where a notebook is not what would be written. ``--run`` executes copies in a
temporary folder, without the cell that installs, and fails on an error and where no figure came
out; ``--quick`` runs them with the option of that name, and ``--store`` stores what they print and
draw. Names of tutorials limit all of these to some. It needs the extra ``docs``.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import os
import re
import resource
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
TUTORIALS, NOTEBOOKS = ROOT / "tutorials", ROOT / "tutorials" / "notebooks"

INSTALL = """\
# Installs ppokit from the clone that this notebook is in, unless it is installed.
from importlib.util import find_spec

if find_spec("ppokit") is None:
    %pip install -q -e "../..[tutorials,atari]"
"""
MOST_BYTES = 300_000  # of a notebook with its outputs
QUICK_LINE = 'QUICK = "--quick" in sys.argv'  # of every tutorial
LONGEST = 3_600  # seconds of a cell


def names() -> list[str]:
    """Return the names of the tutorials."""
    return sorted(path.stem for path in TUTORIALS.glob("*.py"))


def notebook_of(name: str) -> dict[str, Any]:
    """Return the notebook of a tutorial, by sphinx-gallery's converter."""
    from sphinx_gallery.notebook import jupyter_notebook
    from sphinx_gallery.py_source_parser import split_code_and_text_blocks

    _, blocks = split_code_and_text_blocks(TUTORIALS / f"{name}.py")
    conf = {"first_notebook_cell": INSTALL, "last_notebook_cell": None, "pypandoc": False}
    conf |= {"promote_jupyter_magic": False, "notebook_images": False, "rst_link_targets": {}}
    blocks = [b if b[0] == "code" else type(b)(b[0], as_plain_rst(b[1]), b[2]) for b in blocks]
    notebook: Any = jupyter_notebook(blocks, conf, NOTEBOOKS)  # pyright: ignore[reportArgumentType]
    notebook["metadata"]["language_info"] = {"name": "python"}  # not the version that converts
    notebook["metadata"]["kernelspec"]["display_name"] = "Python 3"
    for cell in notebook["cells"]:
        cell["metadata"] = {}
        cell["source"] = "".join(cell["source"]).strip("\n").splitlines(keepends=True)
    return notebook


def as_plain_rst(text: str) -> str:
    """Replace what sphinx-gallery does not bring to Markdown: roles of Sphinx, and tables."""
    text = re.sub(r":doc:`(?:([^`<]+) <)?([^`<>]+?)>?`", _as_link, text)
    text = re.sub(r":(?:class|func|meth|mod|attr):`~?([^`]+)`", r"``\1``", text)
    return re.sub(r"^\.\. list-table::\n((?: +.*\n|\n)+)", _as_table, text + "\n", flags=re.M)


def _as_link(match: re.Match[str]) -> str:
    title, target = match[1], match[2]
    if "/" not in target:
        return f"`{title or target} <{target}.ipynb>`_"
    path = Path(os.path.relpath(ROOT / "docs" / "tutorials" / target, NOTEBOOKS)).as_posix()
    return f"`{title or target.removeprefix('../')} <{path}.md>`_"


def _as_table(match: re.Match[str]) -> str:
    rows: list[list[str]] = []
    for line in match[1].splitlines():
        if (cell := re.match(r" +(\* -|  -|-)(.*)", line)) is not None:
            if cell[1].startswith("*"):
                rows.append([])
            rows[-1].append(cell[2].strip())
        elif rows and line.strip():
            rows[-1][-1] += " " + line.strip()
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]]) + "\n\n"


def as_text(notebook: dict[str, Any]) -> str:
    """Return the content of the file."""
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def write(chosen: Sequence[str]) -> None:
    """Write notebooks, and delete those whose tutorial is gone.

    A cell keeps its outputs if its source did not change.
    """
    NOTEBOOKS.mkdir(exist_ok=True)
    for path in NOTEBOOKS.glob("*.ipynb"):
        if path.stem not in names():
            path.unlink()
    for name in chosen:
        notebook, path = notebook_of(name), NOTEBOOKS / f"{name}.ipynb"
        old = json.loads(path.read_text(encoding="utf-8"))["cells"] if path.exists() else []
        stored = {"".join(cell["source"]): cell.get("outputs", []) for cell in old}
        for cell in notebook["cells"]:
            if cell["cell_type"] == "code":
                cell["outputs"] = stored.get("".join(cell["source"]), [])
        path.write_text(as_text(notebook), encoding="utf-8")


def without_outputs(notebook: dict[str, Any]) -> dict[str, Any]:
    """Return the notebook, with the outputs of its cells removed."""
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            cell["outputs"] = []
    return notebook


def smaller(picture: str) -> str:
    """Return a picture in base64 with 64 colours."""
    from PIL import Image

    buffer = io.BytesIO()
    colours = Image.open(io.BytesIO(base64.b64decode(picture))).convert("RGB").quantize(64)
    colours.save(buffer, "PNG", optimize=True)
    return base64.b64encode(buffer.getvalue()).decode()


def store(name: str, executed: Any) -> None:
    """Write what an executed notebook printed and drew, without progress bars and warnings.

    Raises:
        RuntimeError: the notebook is too large.
    """
    notebook = notebook_of(name)
    first, *cells = notebook["cells"]  # the first installs
    for cell, done in zip(cells, executed.cells, strict=True):
        if cell["cell_type"] == "code":
            found = [x for x in done.outputs if x["output_type"] != "execute_result"]
            cell["outputs"] = [dict(x) for x in found if x.get("name") != "stderr"]
            for output in cell["outputs"]:
                if "image/png" in (data := output.get("data", {})):
                    data["image/png"] = smaller(data["image/png"])
    notebook["cells"] = [first, *cells]
    text = as_text(notebook)
    if len(text.encode()) > MOST_BYTES:
        raise RuntimeError(f"{name}: {len(text.encode()):,} bytes, of at most {MOST_BYTES:,}.")
    NOTEBOOKS.mkdir(exist_ok=True)
    (NOTEBOOKS / f"{name}.ipynb").write_text(text, encoding="utf-8")


def stale(chosen: Sequence[str]) -> list[str]:
    """Return the names of notebooks that differ from what would be written, or should not be."""
    found = []
    for name in chosen:
        path = NOTEBOOKS / f"{name}.ipynb"
        old = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
        if old is None or as_text(without_outputs(old)) != as_text(notebook_of(name)):
            found.append(name)
    return found + [path.stem for path in NOTEBOOKS.glob("*.ipynb") if path.stem not in names()]


def run(name: str, quick: bool, kept: Path | None = None, *, stores: bool = False) -> None:
    """Execute a notebook in an empty folder, and print how long it takes.

    Raises:
        RuntimeError: a cell failed, or there is no figure.
    """
    import nbformat
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError

    notebook: Any = nbformat.reads(as_text(notebook_of(name)), as_version=4)
    del notebook.cells[0]  # installs
    for cell in notebook.cells if quick else ():
        cell.source = cell.source.replace(QUICK_LINE, "QUICK = True")
    started, used = time.perf_counter(), _cpu_seconds()
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    environment.pop("MPLBACKEND", None)  # figures are to be in the notebook
    with tempfile.TemporaryDirectory() as folder:
        client = NotebookClient(notebook, timeout=LONGEST, resources={"metadata": {"path": folder}})
        try:
            client.execute(env=environment)
        except CellExecutionError as error:
            text = re.sub(r"\x1b\[[0-9;]*m", "", str(error))  # without colours
            raise RuntimeError(f"{name}: {text}") from error
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    figures = sum("image/png" in output.get("data", {}) for output in outputs)
    seconds, cpu = time.perf_counter() - started, _cpu_seconds() - used
    print(f"{name}: {seconds:.0f} s ({cpu:.0f} s of CPU), {figures} figures", flush=True)
    if kept is not None:
        nbformat.write(notebook, kept / f"{name}.ipynb")
    if not figures:
        raise RuntimeError(f"{name}: no cell shows a figure.")
    if stores:
        store(name, notebook)


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("names", nargs="*", metavar="NAME", help="of tutorials; all by default")
    parser.add_argument("--check", action="store_true", help="fail where a notebook is stale")
    parser.add_argument("--run", action="store_true", help="execute them")
    parser.add_argument("--quick", action="store_true", help="with the option --quick")
    parser.add_argument("--keep", type=Path, help="a folder for the notebooks that were run")
    parser.add_argument("--store", action="store_true", help="store the outputs of --run")
    args = parser.parse_args()
    chosen = args.names or names()
    if unknown := sorted(set(chosen) - set(names())):
        parser.error(f"no such tutorial: {', '.join(unknown)}; there are {', '.join(names())}.")
    if args.check and (found := stale(chosen)):
        sys.exit(
            f"Not what the scripts give: {', '.join(found)}. Write them with "
            "python -m tests.notebooks"
        )
    if not args.check and not args.run:
        write(chosen)
    if args.keep is not None:
        args.keep.mkdir(parents=True, exist_ok=True)
    for name in chosen if args.run else ():
        run(name, args.quick, args.keep, stores=args.store)


if __name__ == "__main__":
    main()
