"""What jqx does today, so that a change of its inside shows what it changes outside.

For small functions (`functions.py`), each preset and each algorithm, `recorded/` holds what the
public API gives: private modules may move, be renamed or rewritten, and nothing here changes.

- `digests.json`: digests of plans, of weights rounded to nearest, of sums of integers, and of the
  contractions and kernels of converted functions. These must be equal. `forms.json.gz` holds what
  they are digests of, so that a test can print the lines that differ.
- `<algorithm>.npz`: codes that an algorithm chose, and some values of scales, float parameters and
  results, which may differ as rounding does; `comparisons.py` says by how much.

Texts, private names, the source of a plan's signature and the order of equations are in no digest.

The default run takes each function with one preset, and each algorithm with one function. Before a
change is merged:

    pytest tests/characterisation -m "not sweep"         # all plans, codes and programs: a minute
    pytest tests/characterisation -m sweep               # all algorithms: 15 minutes on one core

A change that is meant to alter any of it records it anew, in the same commit:

    python -m tests.characterisation.record              # all, on the CPU: as long as the sweep
    python -m tests.characterisation.record gptq awq     # exact forms, and these algorithms

A search over candidates may take another one on another kind of processor, whose sums have another
order. `awq@avx2.npz` holds what AWQ chooses on such a kind where that is something else, recorded
from a commit whose choices fit elsewhere; either is right.

    python -m tests.characterisation.record @avx2 awq

The message of that commit says for each kind that has changed (plans, codes, programs, sums, and
which algorithms) what is other than before, in which functions and presets, and why it is better:
`git diff --stat tests/characterisation/recorded` and the printed lines of the failing tests say
which. A commit that changes nothing on purpose leaves `recorded/` alone. Programs are recorded
with one version of jax, which `digests.json` names. With others, tests of them are skipped, and the
sweep: the steps of adaround can make more of a rounding than the tolerance allows.

Which branches all tests of the default run take is in CONTRIBUTING.md.

Files, reports, collectives, training and layers of Flax have their own tests, and none here.
"""
