"""How many requests fit: on this machine, on rented GPUs, and which change would help most. Loads no weights.

python examples/05_plan.py [MODEL]
"""

import sys

from octavo.llm.plan import plan_for
from octavo.planner.question import PlanQuestion

model = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m"
here = plan_for(PlanQuestion(model=model, memory="2GiB"))
print(f"{here.model} in 2 GiB: {here.max_concurrency:.1f} requests of {here.max_model_len:,} tokens at once,")
print(f"  {here.kv_bytes_per_token / 1024:g} KiB of KV cache a token; {here.longest_fitting_len:,} tokens fit at most")

cards = PlanQuestion(model="llama-3.1-70b", device="h100-80gb", devices=4, max_model_len="32k", lengths="1155:211")
rented = plan_for(cards)
print(f"\n{rented.model} on {rented.num_devices} x {rented.device}, under {rented.engine} {rented.engine_version}:")
print(
    f"  {rented.max_concurrency:.1f} requests of 32k tokens, {rented.concurrency_at_lengths:.0f} of the usual lengths"
)
for lever in sorted(rented.levers, key=lambda each: each.gain_ratio, reverse=True):
    print(f"  x {lever.gain_ratio:5.2f}  {lever.options or f'if: {lever.name}'}")

tight = plan_for(PlanQuestion(model="llama-3.1-8b", device="rtx4090", max_model_len="128k"))
print(f"\n{tight.model} on one {tight.device} at 128k: {'fits' if tight.fits else 'does not fit'}")
for advice in tight.advice:
    print(f"  {advice.text}")
