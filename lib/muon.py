"""Muon, the optimiser of the matrices of the path's networks (Jordan et al. 2024), batched."""

import torch
from torch import Tensor

MOMENTUM = 0.95
# Newton-Schulz iteration towards the nearest orthogonal matrix: singular values end near 1.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
NUM_ITERATIONS = 5


class Muon(torch.optim.Optimizer):
    r"""Momentum whose step is made orthogonal: :math:`W \leftarrow W - \eta\,c\,UV^\top`.

    U and V are the singular vectors of the averaged gradient. c = 0.2·sqrt(max(rows, columns))
    gives each entry the size that a step of Adam has, so one learning rate serves both. All
    matrices are padded to one size and handled together: torch's own version takes a dozen small
    operations for each. Like torch's fused Adam it does nothing where ``found_inf`` is 1.

    Args:
        matrices: Parameters with two dimensions.
        lr: Learning rate η.
    """

    found_inf: Tensor | None = None

    def __init__(self, matrices: list[Tensor], lr: float = 0.0) -> None:
        super().__init__(matrices, {"lr": lr})
        rows = max(min(w.shape) for w in matrices)
        columns = max(max(w.shape) for w in matrices)
        self.gradient = matrices[0].new_zeros(len(matrices), rows, columns)
        self.average = torch.zeros_like(self.gradient)
        sizes = [0.2 * max(w.shape) ** 0.5 for w in matrices]
        self.size = self.gradient.new_tensor(sizes)[:, None, None]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Take the step."""
        (group,) = self.param_groups
        matrices = group["params"]
        torch._foreach_copy_(_views(self.gradient, matrices), [w.grad for w in matrices])
        average = torch.lerp(self.average, self.gradient, 1 - MOMENTUM)
        step = self.size * orthogonalise(torch.lerp(self.gradient, average, MOMENTUM))
        if self.found_inf is not None:
            bad = self.found_inf > 0
            average = torch.where(bad, self.average, average)
            step = torch.where(bad, 0.0, step)
        self.average.copy_(average)
        torch._foreach_add_(matrices, _views(step, matrices), alpha=-group["lr"])


def orthogonalise(g: Tensor) -> Tensor:
    """UV' of the singular value decomposition USV' of each matrix, nearly; rows ≤ columns."""
    a, b, c = COEFFICIENTS
    x = g / (g.flatten(1).norm(dim=1)[:, None, None] + 1e-7)
    for _ in range(NUM_ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def _views(stack: Tensor, like: list[Tensor]) -> list[Tensor]:
    """The part of the stack that each matrix fills; a tall matrix lies on its side."""
    parts = []
    for padded, w in zip(stack.unbind(), like, strict=True):
        part = padded[: min(w.shape), : max(w.shape)]
        parts.append(part.mT if w.shape[0] > w.shape[1] else part)
    return parts
