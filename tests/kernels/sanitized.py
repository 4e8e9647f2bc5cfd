"""The kernel's tests under AddressSanitizer and UndefinedBehaviorSanitizer.

``python -m tests.kernels.sanitized`` builds the kernel with both in a copy of the sources, and runs
there what calls it: two minutes. Options are pytest's. Where there is no gcc, it says so.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTS = ("tests/kernels", "tests/functional")
FLAGS = ("-shared", "-fPIC", "-O1", "-g", "-fno-omit-frame-pointer", "-fno-trapping-math")
FLAGS += ("-DONE_TARGET",)  # the loader would choose a target before the sanitizers are ready
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined")


def library(name: str) -> str:
    """Return the path of one of the compiler's libraries."""
    command = ["gcc", f"-print-file-name={name}"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def main() -> int:
    if shutil.which("gcc") is None:
        print("Skipped: there is no gcc to build the kernel with.")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "*.so", "outputs"))
        source = copy / "ppokit" / "kernels" / "native.c"
        include = f"-I{sysconfig.get_path('include')}"
        built = str(source.with_name("native.abi3.so"))
        command = ["gcc", *FLAGS, *SANITIZERS, include, str(source), "-o", built, "-lm"]
        subprocess.run(command, check=True)
        environment = os.environ | {
            "PYTHONPATH": str(copy),
            "LD_PRELOAD": f"{library('libasan.so')} {library('libubsan.so')}",
            "ASAN_OPTIONS": "detect_leaks=0",  # Python's own, at its end
        }
        check = "import sys; from ppokit.kernels import native; print(native.__file__)"
        python = sys.executable
        used = subprocess.check_output([python, "-c", check], cwd=copy, env=environment, text=True)
        if used.strip() != built:
            raise RuntimeError(f"The kernel under test is {used.strip()}, not {built}.")
        # reports are written to the file descriptor, which pytest would keep to itself
        pytest = [python, "-m", "pytest", "-q", "-n", "0", "--capture=sys", *TESTS]
        pytest.append("--ignore=tests/kernels/test_triton.py")  # which calls no C
        return subprocess.run([*pytest, *sys.argv[1:]], cwd=copy, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
