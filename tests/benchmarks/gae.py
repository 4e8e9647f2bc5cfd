"""GAE against other libraries' and against a copy: the function, the module, torch.compile.

``python -m tests.benchmarks.gae`` takes about five minutes and writes
``docs/benchmarks/gae.{csv,md,png}``. Other libraries take part where they are installed
(``pip install 'ppokit[bench]'``).
"""

from __future__ import annotations

import argparse
from itertools import chain
from pathlib import Path

from tqdm import tqdm

from tests.benchmarks.timing import on_one_thread

SECONDS = {"function": 16.0, "module": 6.0, "critic": 8.0}  # of timing, for each shape
QUICK_SECONDS = {"function": 0.5, "module": 0.3, "critic": 0.3}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, help="folder to write to, instead of the docs")
    parser.add_argument("--quick", action="store_true", help="small shapes, a temporary folder")
    args = parser.parse_args()
    on_one_thread()
    # torch, with which the rest comes, reads the environment that the line above has set.
    import torch

    from tests.benchmarks import data, gae_compile, gae_function, gae_module, gae_report
    from tests.benchmarks.report import output_folder

    torch.set_num_threads(1)
    folder = args.out or output_folder(args.quick)
    folder.mkdir(parents=True, exist_ok=True)
    seconds = QUICK_SECONDS if args.quick else SECONDS
    shapes = data.QUICK_SHAPES if args.quick else data.SHAPES
    critic_shapes = shapes[:1] if args.quick else gae_module.CRITIC_SHAPES
    stages = chain(
        gae_function.function_rows(shapes, seconds["function"]),
        gae_module.module_rows(shapes, seconds["module"]),
        gae_module.critic_rows(critic_shapes, seconds["critic"]),
        () if args.quick else gae_compile.compile_rows(),
    )
    compiled = 0 if args.quick else len(gae_compile.STEPS)
    rows = []
    with tqdm(total=2 * len(shapes) + len(critic_shapes) + compiled, unit="shape") as bar:
        for found in stages:
            rows += found
            bar.set_postfix_str(f"{found[0].part} {list(found[0].shape)}")
            bar.update()
    gae_function.add_memory(rows)
    report = gae_report.write_report(folder, rows)
    print(f"{report}\n\n{report.read_text()}")


if __name__ == "__main__":
    main()
