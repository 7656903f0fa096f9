"""Run every benchmark and rewrite the table in `benchmarks/README.md` from what they wrote.

python -m benchmarks                 # all
python -m benchmarks sampling noise  # some
"""

import json
import subprocess
import sys
from pathlib import Path

from benchmarks.harness import RESULTS, Row, described, table

HERE = Path(__file__).parent
NOT_BENCHMARKS = {
    *("__init__", "__main__", "harness", "mutants", "mutations", "plain_loop", "problems"),
    *("attackers", "study", "study_tables", "causal_lms", "merged_models"),
}
"""Also parts of others (`attackers` of `attacks`, `causal_lms` of `model_families`), and what runs
by itself: over what changed (`mutants`), or for hours (`study`)."""
BEGIN, END = "<!-- results -->", "<!-- /results -->"


def main(chosen: list[str]) -> int:
    """Run each in a separate process, so that none warms the caches of another."""
    names = sorted(path.stem for path in HERE.glob("*.py") if path.stem not in NOT_BENCHMARKS)
    failed: list[str] = []
    for name in chosen or names:
        print(f"\n{name}\n", flush=True)
        command = [sys.executable, "-m", f"benchmarks.{name}"]
        if subprocess.run(command, cwd=HERE.parent, check=False).returncode != 0:
            failed.append(name)
    rewrite_readme(HERE / "README.md", RESULTS)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def rewrite_readme(readme: Path, results: Path) -> None:
    """Put the tables of all results between the two marks."""
    parts: list[str] = []
    for path in sorted(results.glob("*.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        rows = [Row(**row) for row in result["rows"]]
        made_by = f"`{result['command']}` at {result['commit']}"
        where = described(result["machine"])
        parts.append(f"## {path.stem}\n\n{made_by}; {where}\n\n{table(rows)}\n")
    before, _, rest = readme.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    text = f"{before}{BEGIN}\n\n{chr(10).join(parts)}\n{END}{after}"
    readme.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
