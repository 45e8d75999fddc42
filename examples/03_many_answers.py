"""Four answers to one prompt: they share its blocks, and each copies the last one before it writes to it.

python examples/03_many_answers.py [MODEL]
"""

import sys
from collections.abc import Sequence

from octavo import LLM, SamplingParams

PROMPT = "Once upon a time, in a house at the edge of a forest, there lived an old man who repaired clocks. One day"

llm = LLM(sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m")


def report(events: Sequence[object]) -> None:
    """Print what the scheduler says about sharing. Events are plain values; any consumer may fold over them."""
    for event in events:
        if type(event).__name__ in {"RequestForked", "BlockCopied"}:
            print(event)


llm.engine.subscribe(report)
params = SamplingParams(n=4, seed=7, temperature=0.8, max_tokens=24)
[output] = llm.generate(PROMPT, params)

for answer in output.outputs:
    print(f"answer {answer.index}: {answer.text!r}")

# Answer 2 draws with seed + 2, whatever runs beside it, so a request of its own says the same.
[single] = llm.generate(PROMPT, SamplingParams(seed=7 + 2, temperature=0.8, max_tokens=24))
print("answer 2 alone is the same:", single.outputs[0].text == output.outputs[2].text)
