"""Files of fits: what they hold, which are refused, and which models count as another."""

import copy
import errno
import math
import pickle
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributions import (
    Gamma,
    Independent,
    LogNormal,
    MixtureSameFamily,
    MultivariateNormal,
    Normal,
)

import lib
from lib import storage
from lib.storage import difference, identity

CONFIG = lib.FitConfig(num_steps=2, num_samples=4, refits=0, log_every=1)
COUNTS = lib.Observations([0.2, 0.5], [[3.0], [torch.nan]], 0.1)
DATA = lib.Observations([0.2, 0.4, 1.0], [[19.0], [18.7], [torch.nan]], 0.1)


def ou(
    sde=None, F=((1.0,),), sigma=1.0, prior=None, x0=(20.0,), data=DATA
) -> tuple[lib.StateSpaceModel, lib.Observations]:
    """OU on three times, with any piece replaced."""
    sde, prior = sde or lib.OrnsteinUhlenbeck(), prior or Normal(torch.zeros(3), 1.0)
    x0 = x0 if isinstance(x0, dict) else list(x0)
    return lib.StateSpaceModel(sde, lib.GaussianObservation(F, sigma), prior, x0), data


def sir(x0=(762.0, 1.0), prior=None, F=((0.0,), (1.0,)), data=COUNTS):
    """SIR, with positive states, likewise."""
    prior = prior or Normal(torch.zeros(3), 1.0)
    x0 = x0 if isinstance(x0, dict) else list(x0)
    return lib.StateSpaceModel(lib.SIR(), lib.GaussianObservation(F, "sigma"), prior, x0), data


MODELS = {
    "fixed x0": ou,
    "random x0": lambda: ou(x0={"x": Normal(20.0, 1.0)}),
    "positive": sir,
    "positive, x0 half random": lambda: sir(x0={"S": 762.0, "I": LogNormal(0.0, 0.3)}),
}
FAMILIES = {
    "study": lib.Family(),
    "paper": lib.Family.paper(),
    "no chain": lib.Family(base=False, unit=3.0),
    "plain": lib.Family(num_flows=0, theta_flows=0, base=False, features="past", taps=False),
}


def short_fit(model: str = "fixed x0", family: str = "plain", **changes) -> lib.FitResult:
    config = replace(CONFIG, family=FAMILIES[family], **changes)
    return lib.fit(*MODELS[model](), config, seed=3, device="cpu", progress=False)


@pytest.fixture(scope="module")
def fit() -> lib.FitResult:
    return short_fit()


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_loaded_fit_is_the_saved_one_to_the_last_bit(model, family, tmp_path):
    """Kills a buffer or weight that is made anew, in every family and for every kind of state."""
    made = short_fit(model, family, dtype="float32" if family == "study" else "float64")
    with torch.no_grad():
        for weight in made.q.parameters():
            weight.add_(0.01 * torch.randn_like(weight))
    made.save(tmp_path / "fit.pt")
    loaded = lib.load_fit(tmp_path / "fit.pt", *MODELS[model]())
    assert all(map(torch.equal, loaded.draws(7, 1), made.draws(7, 1)))
    assert loaded.q.state_dict().keys() == made.q.state_dict().keys()
    for one, other in zip(
        loaded.q.state_dict().values(), made.q.state_dict().values(), strict=True
    ):
        assert one.dtype == other.dtype and one.equal(other)
    assert not any(weight.requires_grad for weight in loaded.q.parameters())
    # A step of two may be skipped: NaN.
    for one, other in zip(loaded.history, made.history, strict=True):
        np.testing.assert_array_equal(one, other)
    for name in ("family", "converged", "reason", "seed", "device"):
        assert getattr(loaded, name) == getattr(made, name)
    assert type(loaded.device) is str and type(loaded.seed) is int


def test_a_fit_of_another_device_loads_on_the_cpu(fit, tmp_path, monkeypatch):
    """A file that says its tensors lay on a GPU. Kills a load without a map to the CPU."""
    monkeypatch.setattr(torch.serialization, "location_tag", lambda *_: "cuda:0")
    replace(fit, device="cuda").save(tmp_path / "fit.pt")
    monkeypatch.undo()
    loaded = lib.load_fit(tmp_path / "fit.pt", *ou())
    assert loaded.device == "cuda" and loaded.draws(3).x.device.type == "cpu"
    assert loaded.draws(3).x.equal(fit.draws(3).x)


def test_a_seed_of_numpy_does_not_make_a_file_that_cannot_be_read(fit, tmp_path):
    made = copy.copy(fit)
    made.seed = np.int64(4)
    made.save(tmp_path / "fit.pt")
    assert lib.load_fit(tmp_path / "fit.pt", *ou()).seed == 4


def test_options_of_numpy_do_not_make_a_file_that_cannot_be_read(fit, tmp_path):
    """A width that came out of an array. Kills a file of numpy's own kinds."""
    made, family = copy.copy(fit), copy.copy(fit.family)
    vars(family).update(hidden=np.int64(32), unit=np.float64(1.0), gate=np.str_("unbounded"))
    made.family = family
    made.save(tmp_path / "fit.pt")
    loaded = lib.load_fit(tmp_path / "fit.pt", *ou())
    assert loaded.family == family == fit.family
    kinds = {k: type(v) for k, v in vars(loaded.family).items()}
    assert (kinds["hidden"], kinds["unit"], kinds["gate"]) == (int, float, str)


def test_a_save_that_breaks_off_leaves_the_old_file(fit, tmp_path, monkeypatch):
    """Kills a file that is written in place, and a half one left beside it."""
    path = tmp_path / "fit.pt"
    fit.save(path)
    before = path.read_bytes()

    def half(to, content):
        with to.open("wb") as file:
            file.write(content[:100])
        raise OSError(errno.ENOSPC, "no space left", str(to))

    monkeypatch.setattr(Path, "write_bytes", half)
    with pytest.raises(OSError, match=rf"no space left: '{path}'$"):
        fit.save(path)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]
    monkeypatch.undo()
    replace(fit, seed=8).save(str(path))
    assert lib.load_fit(str(path), *ou()).seed == 8 and list(tmp_path.iterdir()) == [path]


def test_save_refuses_what_is_no_place_for_a_file(fit, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"a folder that is there; got .*Make .*none first"):
        fit.save(tmp_path / "none" / "fit.pt")
    with pytest.raises(ValueError, match="path must name a file; got the folder .*as in fit.pt"):
        fit.save(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_may_not_be_written_is_named(fit, tmp_path, monkeypatch):
    """Kills torch's RuntimeError, which names neither, and the name of the file beside."""

    def refuse(to, *_, **__):
        raise PermissionError(errno.EACCES, "Permission denied", str(to))

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(PermissionError, match=rf"Permission denied: '{tmp_path / 'fit.pt'}'$"):
        fit.save(tmp_path / "fit.pt")


def test_a_flipped_bit_is_seen_or_does_no_harm(fit, tmp_path):
    """In 60 places. Kills a load of other weights, a seed or a history without a word."""
    path = tmp_path / "fit.pt"
    fit.save(path)
    whole, seen = path.read_bytes(), 0
    for at in np.random.default_rng(2).integers(len(whole), size=60):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 64]) + whole[at + 1 :])
        try:
            loaded = lib.load_fit(path, *ou())
        except ValueError as err:
            seen += "a damaged one: the checksum of " in str(err)
            continue
        assert loaded.draws(5).log_q.equal(fit.draws(5).log_q) and loaded.reason == fit.reason
        assert loaded.seed == fit.seed and loaded.family == fit.family
    assert seen > 20


def bytes_of_no_fit(fit, path) -> dict[str, bytes]:
    """Files that are something else, or a part of a fit."""
    fit.save(path)
    whole, made = path.read_bytes(), {"empty": b"", "text": b"t,y\n0.1,19.5\n"}
    made |= {f"cut at {share}": whole[: int(share * len(whole))] for share in (0.1, 0.5, 0.9, 0.99)}
    made |= {"cut by a byte": whole[:-1], "noise": np.random.default_rng(1).bytes(5000)}
    np.savez(path, a=np.ones(3))
    made |= {
        "npz": path.with_name(path.name + ".npz").read_bytes(),
        "pickle": pickle.dumps({"a": 1}),
    }
    path.with_name(path.name + ".npz").unlink()
    others = {"weights": {"weights": 1}, "tensor": torch.ones(3), "fit": fit.family}
    for name, content in others.items():
        torch.save(content, path)
        made[name] = path.read_bytes()
    torch.save({key: {} for key in storage.KEYS - {"verdict"}}, path)
    return made | {"lacking": path.read_bytes(), "magic": b"\x80\x02.", "zip": b"PK\x03\x04" * 9}


def test_a_file_that_is_no_fit_is_refused(fit, tmp_path):
    """Kills a raw KeyError, UnpicklingError or error of the zip reader."""
    path = tmp_path / "fit.pt"
    for name, content in bytes_of_no_fit(fit, path).items():
        path.write_bytes(content)
        with pytest.raises(
            ValueError, match=f"{path} must be a file written by FitResult.save; got"
        ):
            lib.load_fit(path, *ou())
        assert name
    with pytest.raises(ValueError, match="path must name a file; got the folder"):
        lib.load_fit(tmp_path, *ou())
    with pytest.raises(FileNotFoundError, match=re.escape(str(tmp_path / "none.pt"))):
        lib.load_fit(tmp_path / "none.pt", *ou())


@pytest.mark.parametrize("part", ["identity", "family"])
def test_a_file_of_another_version_is_refused(fit, tmp_path, part):
    """Kills a KeyError where a key of the file has come or gone."""
    fit.save(tmp_path / "fit.pt")
    saved = torch.load(tmp_path / "fit.pt", weights_only=True)
    saved[part]["what"] = saved[part].popitem()[1]
    torch.save(saved, tmp_path / "fit.pt")
    with pytest.raises(ValueError, match="must be of this version of lib; got another's. Fit ag"):
        lib.load_fit(tmp_path / "fit.pt", *ou())


class Late(lib.OrnsteinUhlenbeck):
    """Drifts from time 0.85 on."""

    def __init__(self, size: float) -> None:
        self.size = size

    def drift(self, t, x, theta):
        return super().drift(t, x, theta) + self.size * (t > 0.85)


class Saturated(lib.OrnsteinUhlenbeck):
    """Feels x up to a limit."""

    def __init__(self, limit: float) -> None:
        self.limit = limit

    def drift(self, t, x, theta):
        return super().drift(t, x.clamp(max=self.limit), theta)


class Curved(lib.OrnsteinUhlenbeck):
    """Noise x^power: at x = 1 the same for all."""

    def __init__(self, power: float) -> None:
        self.power = power

    def diffusion(self, t, x, theta):
        return (theta[..., 2:] * x.abs() ** self.power).square()[..., None]

    def diffusion_tril(self, t, x, theta):
        return (theta[..., 2:] * x.abs() ** self.power)[..., None]


class Negative(lib.OrnsteinUhlenbeck):
    """Of a mean that counts only where it is positive."""

    positive_theta = ("theta1", "theta2", "theta3")


def normals(*loc: float) -> Normal:
    return Normal(torch.tensor(loc), 1.0)


def correlated(i: int, j: int) -> MultivariateNormal:
    matrix = torch.eye(3)
    matrix[i, j] = matrix[j, i] = 0.5
    return MultivariateNormal(torch.zeros(3), matrix)


def lognormals(scale: float) -> dict[str, LogNormal]:
    """Priors of θ itself, narrow, in places far apart."""
    names, places = ("theta1", "theta3"), (-2.0, 1.0)
    parts = {name: LogNormal(place, 0.01) for name, place in zip(names, places, strict=True)}
    return parts | {"theta2": Normal(100.0, scale)}


def two_normals(share: float) -> MixtureSameFamily:
    parts = Independent(Normal(torch.tensor([[0.0] * 3, [4.0] * 3]), 1.0), 1)
    return MixtureSameFamily(
        torch.distributions.Categorical(torch.tensor([1 - share, share])), parts
    )


MOVED = lib.Observations(DATA.times - 1, DATA.y, 0.1, t0=-1.0)
LONGER = lib.Observations([0.2, 0.4, 1.1], DATA.y, 0.1)
MIRRORED = torch.tensor(-18.0 + 0.2 * math.sin(1.0), dtype=torch.float64)
HALF = lib.Observations(DATA.times, torch.cat([DATA.y, DATA.y * torch.nan], 1), 0.1)
SEEN = lib.Observations(DATA.times, [[19.0], [18.7], [0.0]], 0.1)
PAIRS = {
    "prior density, moved by as much elsewhere": (
        ou(prior=normals(0.7, 0.0, 0.0)), ou(prior=normals(0.0, 0.0, -0.7))),
    "prior density, exchanged": (
        ou(prior=normals(0.1, 0.0, 0.2)), ou(prior=normals(0.2, 0.0, 0.1))),
    "prior density, of which two correlate": (
        ou(prior=correlated(0, 1)), ou(prior=correlated(0, 2))),
    "prior density, narrow": (ou(prior=lognormals(0.1)), ou(prior=lognormals(0.11))),
    "prior density, a mode further out": (ou(prior=two_normals(0.1)), ou(prior=two_normals(0.11))),
    "prior density, on the natural scale": (
        sir(prior={s: LogNormal(0.0, 1.0) for s in ("theta1", "theta2", "sigma")}),
        sir(prior={s: Gamma(2.0, 1.0) for s in ("theta1", "theta2", "sigma")})),
    "x0": (ou(x0=[20.0]), ou(x0=[20.5])),
    "x0, random": (ou(x0=[20.0]), ou(x0={"x": Normal(20.0, 1.0)})),
    "x0 density, the same at 1": (
        ou(x0={"x": Normal(20.0, 1.0)}), ou(x0={"x": Normal(-18.0, 1.0)})),
    "x0 density, the same at the point next to 1": (
        ou(x0={"x": Normal(20.0, 1.0)}), ou(x0={"x": Normal(MIRRORED, 1.0)})),
    "x0 density, narrow": (
        sir(x0={"S": 762.0, "I": LogNormal(3.0, 0.01)}),
        sir(x0={"S": 762.0, "I": LogNormal(3.0, 0.011)})),
    "t0": (ou(), ou(data=lib.Observations(DATA.times, DATA.y, 0.1, t0=-1.0))),
    "t0, moved": (ou(), ou(data=MOVED)),
    "dt": (ou(), ou(data=lib.Observations(DATA.times, DATA.y, 0.05))),
    "times": (ou(), ou(data=LONGER)),
    "number of observed columns": (ou(), ou(F=((1.0, 1.0),), data=HALF)),
    "y": (ou(), ou(data=SEEN)),
    "transition density, later": (ou(sde=Late(0.0)), ou(sde=Late(0.01))),
    "transition density, further out": (ou(sde=Saturated(15.0)), ou(sde=Saturated(99.0))),
    "transition density, not at 1": (ou(sde=Curved(1.0)), ou(sde=Curved(1.1))),
    "bounds": (ou(), ou(sde=Negative())),
    "observation density, F": (ou(), ou(F=((1.001,),))),
    "observation density, the other state": (sir(), sir(F=((1.0,), (0.0,)))),
    "observation density, a known sigma": (ou(), ou(sigma=1.0001)),
    "observation density, a function": (
        ou(sigma=lambda named: named["theta1"]), ou(sigma=lambda named: named["theta3"])),
    "observation density, of what is never read": (
        ou(F=((1.0, 1.0),), sigma=(1.0, 2.0), data=HALF),
        ou(F=((1.0, 1.0),), sigma=(1.0, 3.0), data=HALF)),
    "theta_names": (ou(), sir()),
}  # fmt: skip


@pytest.mark.parametrize("name", PAIRS)
def test_another_model_or_other_data_are_told_apart_and_named(name):
    """Kills a comparison at one point, at one time, of x = 1 alone, or of the sum of the terms."""
    here, there = (identity(*pair) for pair in PAIRS[name])
    what = name.split(",")[0]
    for told in (difference(here, there), difference(there, here)):
        assert re.match(rf"{what}( \(.* of trial .*\))?; got ", told), told
        assert ("(" in told.split(";")[0]) == ("density" in what)


@pytest.mark.parametrize("name", PAIRS)
def test_the_same_model_is_the_same(name):
    """Kills a comparison that NaN fails, or that depends on what was computed before."""
    for model, data in PAIRS[name]:
        here = identity(model, data)
        model.log_prior(model.sample_prior(5, seed=1)), model.sample_x0(5, seed=1)
        there = identity(
            copy.deepcopy(model), lib.Observations(data.times, data.y, data.dt, data.t0)
        )
        assert difference(here, there) == "" and here == there


def test_another_rounding_is_no_other_model():
    here = identity(*ou())
    for change, other in ((1 + 1e-12, False), (1 + 1e-7, True)):
        there = copy.deepcopy(here)
        there["transition density"] = [v * change for v in here["transition density"]]
        assert bool(difference(here, there)) == other


def test_a_difference_is_told_in_few_words():
    """Kills a message of every reading."""
    data = lib.Observations(0.1 * torch.arange(1, 201), torch.arange(200.0), 0.1)
    moved = lib.Observations(data.times, data.y + (data.y == 7), 0.1)
    first, second = identity(*ou(data=data)), identity(*ou(data=moved))
    assert difference(first, second) == "y; got [7.0], the fit has [8.0], in entry 8"
    shorter = lib.Observations(data.times[:190], data.y[:190], 0.1)
    told = difference(first, identity(*ou(data=shorter)))
    assert told == "times; got 200 entries, the fit has 190"
    told = difference(first, identity(*sir()))
    assert told.startswith(
        "theta_names; got ['theta1', 'theta2', 'theta3'], the fit has ['theta1',"
    )


def test_data_that_do_not_fit_the_model_are_not_blamed_for_the_fit(fit, tmp_path):
    """Kills: 'the fit has another y', where model and data disagree."""
    fit.save(tmp_path / "fit.pt")
    with pytest.raises(ValueError, match="F has 1 columns, so the data need .*; got 2: y0, y1"):
        lib.load_fit(tmp_path / "fit.pt", ou()[0], HALF)
