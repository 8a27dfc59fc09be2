r"""Muon (Jordan et al. 2024), momentum made orthogonal: :math:`W \leftarrow W - \eta c UV^\top`."""

import torch
from jaxtyping import Float
from torch import Tensor

MOMENTUM = 0.95
# Newton-Schulz iteration towards the nearest orthogonal matrix: singular values end near 1.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
NUM_ITERATIONS = 5
# Wider matrices have a stack of their own: padding costs arithmetic, but each stack costs calls.
NARROW = 20


class Stack:
    r"""Matrices of like size, padded with zeros to one size; a tall one lies on its side.

    Torch's own version takes a dozen small operations for each matrix. U and V are the singular
    vectors of the averaged gradient, and c = 0.2·sqrt(max(rows, columns)) gives each entry the size
    that a step of Adam has, so one learning rate serves both.

    Args:
        matrices: Tensors with two dimensions.
    """

    def __init__(self, matrices: list[Tensor]) -> None:
        self.matrices = matrices
        rows = max(min(w.shape) for w in matrices)
        columns = max(max(w.shape) for w in matrices)
        self.shape = (len(matrices), rows, columns)
        sizes = [0.2 * max(w.shape) ** 0.5 for w in matrices]
        self.size = matrices[0].new_tensor(sizes)[:, None, None]

    def views(self, stack: Float[Tensor, "matrix row column"]) -> list[Tensor]:
        """The part of a tensor of this shape that each matrix fills, lying as the matrix does."""
        parts = []
        for padded, w in zip(stack.unbind(), self.matrices, strict=True):
            part = padded[: min(w.shape), : max(w.shape)]
            parts.append(part.mT if w.shape[0] > w.shape[1] else part)
        return parts

    def direction(
        self,
        gradient: Float[Tensor, "matrix row column"],
        average: Float[Tensor, "matrix row column"],
    ) -> Float[Tensor, "matrix row column"]:
        """c UV' of Nesterov's mix of the gradient and its average, this gradient included."""
        return self.size * orthogonalise(torch.lerp(gradient, average, MOMENTUM))


def by_width(matrices: list[Tensor]) -> list[Stack]:
    """Stacks of the narrow matrices and of the wide ones, where there are any."""
    narrow = [w for w in matrices if max(w.shape) <= NARROW]
    wide = [w for w in matrices if max(w.shape) > NARROW]
    return [Stack(group) for group in (narrow, wide) if group]


def orthogonalise(g: Float[Tensor, "matrix row column"]) -> Float[Tensor, "matrix row column"]:
    """UV' of the singular value decomposition USV' of each matrix, nearly; rows ≤ columns."""
    a, b, c = COEFFICIENTS
    x = g / (g.flatten(1).norm(dim=1)[:, None, None] + 1e-7)
    for _ in range(NUM_ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x
