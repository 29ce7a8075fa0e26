"""Every tolerance of the checks on a GPU, by precision, and where it comes from.

An error is relative: the largest difference over the largest number that was wanted. What is wanted
is computed in fp64 on the CPU, from weights and inputs that every precision holds exactly, unless a
check says otherwise.

Units of rounding: fp64 2^-53 = 1e-16, fp32 2^-24 = 6e-8, TF32 and fp16 2^-11 = 5e-4 (11 bits), bf16
2^-8 = 4e-3 (8 bits). TF32, fp16 and bf16 products are added up in fp32, so that their errors are a
few units, whatever the length of the sums; fp32 sums of some hundred products in four layers lose
some ten units. Beside each table stands the largest error that was measured over all models and
scorers with a CPU for the GPU (TF32: emulated, operands rounded to 11 bits); the tolerance leaves a
factor of 5 to 10 to another order of sums.
"""

#: The same bits.
EXACT = 0.0

#: Outputs of a model (measured: fp64 2e-15, fp32 1.3e-6, TF32 1.7e-3, autocast 1.6e-2, bf16 2.0e-2,
#: fp16 2.4e-3). In fp64: far above rounding, far below the 6e-8 of a single step that is taken in
#: fp32.
OUTPUTS = {"fp64": 1e-11, "fp32": 2e-5, "tf32": 1e-2, "autocast": 1e-1, "bf16": 1e-1, "fp16": 1e-2}

#: Scores (measured: fp32 9e-6, TF32 6e-3, autocast 4.8e-2, bf16 5.0e-2, fp16 8e-3). Differences of
#: losses and gradients cancel, so that they lose some ten units more than outputs.
SCORES = {
    "fp64": 1e-9,
    "fp32": 1e-4,
    "tf32": 3e-2,
    "autocast": 2.5e-1,
    "bf16": 2.5e-1,
    "fp16": 4e-2,
}

#: Gradients of gates that are fp32 in a model in fp64: they are rounded to fp32, once.
GATE_GRADIENTS = 1e-6

#: Scores from gates that are trained: each of ten steps begins where the one before ended, and
#: Adam's steps are of one length however small a gradient is (measured: bf16 2.7e-1 for
#: subset_topk, whose gates are almost 0 or 1).
TRAINED_SCORES = {
    "fp64": 1e-8,
    "fp32": 1e-3,
    "tf32": 1e-1,
    "autocast": 1.0,
    "bf16": 1.0,
    "fp16": 2e-1,
}

#: One minus Spearman's rank correlation of scores, where numbers are narrow (measured: 1e-2): close
#: calls may swap.
RANKS = 0.1

#: Weights of refits: the solution of normal equations magnifies errors of its sums by the condition
#: number, which a ridge of 0.3 keeps at some hundred (measured: fp32 8e-6, TF32 5.1e-3).
REFITS = {"fp64": 1e-8, "fp32": 1e-4, "tf32": 4e-2}

#: How far a refit in TF32 may stay behind the one in fp64: the share of its error that is left over
#: (measured: 1e-3).
RUINED = 2e-2

#: The loss after some steps of AdamW, relative (measured: fp32 2e-6, bf16 autocast 4e-3).
TRAINING = {"fp64": 1e-8, "fp32": 1e-3, "autocast": 5e-2}
