"""Two prompts, answered together; then one more, piece by piece.

python examples/01_generate.py [MODEL]
"""

import sys

from octavo import LLM, SamplingParams

llm = LLM(sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m")
params = SamplingParams(max_tokens=16, temperature=0.0)

for output in llm.generate(["The capital of France is", "The capital of Italy is"], params):
    print(f"{output.prompt!r} goes on with {output.outputs[0].text!r}")

print("As it comes:", end="")
for delta in llm.stream("The library has", params):
    print(delta.text, end="", flush=True)
print()
