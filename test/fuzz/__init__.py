"""Random networks, data and losses, and everything that the package says about them, against plain
autodiff.

    python -m test.fuzz START COUNT     from the root of the repository

Each seed is a network, data, a loss, a choice of parameters and a handful of checks. What is
expected is computed in `truth.py` and `kronecker.py` by `torch.autograd.grad` of one example at a
time, and by dense algebra; nothing of the package is used for it. A failure is printed with its
seed, the law, the numbers and the case.
"""
