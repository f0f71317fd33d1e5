"""One curvature by several processes: each reads its part of the data, and all get the matrix of
the whole.

torchrun --nproc_per_node=2 examples/processes.py      # some seconds; also alone: python
examples/processes.py
"""

import torch
from torch import distributed, nn

from curvlinops_plus import EKFAC, GGN, EmpiricalRisk, MonteCarlo, Processes, curvature

torch.set_num_threads(1)  # each process has a core of its own


def main():
    torch.manual_seed(0)  # the same network in all processes, which is checked
    model, loss = (
        nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 10)),
        nn.CrossEntropyLoss(),
    )
    X = torch.randn(2001, 64)
    data = [*zip(X.split(200), (X @ torch.randn(64, 10)).argmax(1).split(200))]

    processes = Processes() if distributed.is_initialized() else None
    mine = data if processes is None else processes.share(data)
    risk = EmpiricalRisk(model, loss, mine, processes=processes)
    K = curvature(risk, EKFAC, vectors=MonteCarlo(seed=0))
    direction = K.inverse(damping=1e-2) @ risk.gradient()  # equal in all processes
    decrease = sum(float((d * (GGN(risk) @ direction)[key]).sum()) for key, d in direction.items())

    alone = curvature(
        EmpiricalRisk(model, loss, data), EKFAC, vectors=MonteCarlo(seed=0)
    )  # by each process itself
    v = torch.ones(K.shape[1])
    difference = float((K @ v - alone @ v).norm() / (alone @ v).norm())
    if processes is None or processes.rank == 0:
        print(
            f"{K.examples} examples by {1 if processes is None else processes.world} processes; "
            "this one read"
        )
        print(
            f"{sum(len(x) for x, _ in mine)} of them. From one process alone K differs by "
            f"{difference:.0e}."
        )
        print(f"dᵀ G d of the preconditioned gradient: {decrease:.4f}")
    assert difference < 1e-3, difference


if distributed.is_torchelastic_launched():
    distributed.init_process_group("gloo")
    main()
    distributed.barrier()  # nobody ends the group while another one still uses it
    distributed.destroy_process_group()
else:
    main()
