"""actor_critic's encoders: by name, modules of the user's, and images in any layout."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict
from torch import nn
from torchrl.objectives.value import GAE as TorchRLGAE  # noqa: N811

from ppokit import GAE, DualClipPPOLoss, GymCollector
from ppokit.networks import actor_critic
from tests.networks.environments import BOX, CHOICE, VECTOR, Spaces, assert_updates, collect

VECTOR_4 = spaces.Box(-5, 5, (4,), np.float32)
BITS = spaces.Box(0, 1, (10, 10, 4), np.bool_)
LARGE = spaces.Box(0, 255, (4, 84, 84), np.uint8)
PARTS = spaces.Dict(image=LARGE, speed=VECTOR, level=spaces.Discrete(4))
SHAPES = {  # of the weights up to the features
    "nature": [(32, 4, 8, 8), (64, 32, 4, 4), (64, 64, 3, 3), (512, 3136)],
    "impala": [
        *((16, 4, 3, 3), *[(16, 16, 3, 3)] * 4),
        *((32, 16, 3, 3), *[(32, 32, 3, 3)] * 4),
        *((32, 32, 3, 3), *[(32, 32, 3, 3)] * 4, (256, 3872)),
    ],
    "small": [(16, 4, 3, 3), (128, 107584)],
}


def weights(network: nn.Module) -> list[tuple[int, ...]]:
    return [tuple(p.shape) for p in network.parameters() if p.ndim > 1]


@pytest.mark.parametrize("name", SHAPES)
def test_encoders_by_name(name: str):
    for network in actor_critic((LARGE, CHOICE), hidden=(), encoder=name):
        assert weights(network)[:-1] == SHAPES[name]


def features_by_hand(network: nn.Module, images: torch.Tensor) -> torch.Tensor:
    """The residual network, layer by layer, on ``[N, C, H, W]``."""
    convolutions = iter([x for x in network.modules() if isinstance(x, nn.Conv2d)])
    x = images
    for _ in range(3):
        x = nn.functional.max_pool2d(next(convolutions)(x), 3, 2, 1)
        for _ in range(2):
            inner = next(convolutions)(x.relu())
            x = x + next(convolutions)(inner.relu())
    *_, last = [x for x in network.modules() if isinstance(x, nn.Linear) and x.out_features == 256]
    return last(x.relu().flatten(1)).relu()


def test_the_residual_network_is_that_of_the_paper():
    torch.manual_seed(0)
    _, critic = actor_critic((LARGE, CHOICE), hidden=(), encoder="impala")
    images = torch.randint(0, 256, (2, 4, 84, 84), dtype=torch.uint8)
    expected = critic.module[-1](features_by_hand(critic, images / 255))
    found = critic(TensorDict({"observation": images}, [2]))["state_value"]
    torch.testing.assert_close(found, expected)


LAYOUTS = [
    *[(layout, (2, 40, 36, 3)) for layout in ("HWC", "CHW", "HW", "FHWC", "FCHW")],
    *[(layout, (3, 40, 36, 3)) for layout in ("FHWC", "FCHW")],
    *[(layout, (2, 38, 38, 99)) for layout in ("HWC", "CHW", "FHWC", "FCHW")],
    *[(layout, (4, 40, 40, 40)) for layout in ("HWC", "FHWC")],  # channels come last
]


@pytest.mark.parametrize("name", ["nature", "small"])
@pytest.mark.parametrize(("layout", "sizes"), LAYOUTS)
def test_images_in_any_layout(name: str, layout: str, sizes: tuple[int, ...]):
    """The convolutions see ``[N, C, H, W]``, in any memory, with any number of batch dimensions."""
    size = dict(zip("FHWC", sizes, strict=True))
    shape = [size[x] for x in layout]
    space = spaces.Box(0, 51, shape, np.uint8)
    _, critic = actor_critic((space, CHOICE), hidden=(), encoder=name)
    images = torch.randint(0, 52, (2, 3, *shape), dtype=torch.uint8)
    ordered = torch.einsum(f"ab{layout}->ab{layout.replace('HW', '')}HW", images.float() / 51)
    ordered = ordered.reshape(6, -1, size["H"], size["W"])
    *convolutions, last = [x for x in critic.modules() if isinstance(x, nn.Conv2d | nn.Linear)]
    for layer in convolutions:
        ordered = layer(ordered.flatten(1) if isinstance(layer, nn.Linear) else ordered).relu()
    found = critic(TensorDict({"pixels": images, "observation": images}, [2, 3]))["state_value"]
    torch.testing.assert_close(found, last(ordered).reshape(2, 3, 1))


@pytest.mark.parametrize("shape", [(8, 8, 111), (7, 7, 20), (10, 10, 10), (20, 10, 7), (13, 7, 4)])
def test_boards_with_many_kinds_of_pieces(shape: tuple[int, int, int]):
    """The convolutions go over rows and columns; MinAtar's Seaquest has 10 x 10 x 10."""
    _, critic = actor_critic((spaces.Box(0, 1, shape, np.bool_), CHOICE), (), encoder="small")
    convolution, linear, last = [
        x for x in critic.modules() if isinstance(x, nn.Conv2d | nn.Linear)
    ]
    images = torch.rand(5, *shape) < 0.3
    hidden = convolution(images.permute(0, 3, 1, 2).float()).relu().flatten(1)
    torch.testing.assert_close(critic.module(images), last(linear(hidden).relu()))


@pytest.mark.parametrize(
    ("shape", "height"),
    [
        ((4, 6, 9, 3), 1),  # frames, rows, columns, colors
        ((4, 5, 7, 3), 1),
        ((3, 3, 21, 16), 2),
        ((6, 9, 16), 1),
        ((20, 32, 64), 1),
        ((20, 9, 11), 1),
        ((111, 8, 8), 1),
        ((8, 9, 111), 0),
        ((21, 16, 3), 0),
        ((4, 4, 10, 10), 2),
    ],
)
def test_height_and_width_of_other_shapes(shape: tuple[int, ...], height: int):
    _, critic = actor_critic((spaces.Box(0, 1, shape, np.bool_), CHOICE), (), encoder="small")
    (convolution,) = [x for x in critic.modules() if isinstance(x, nn.Conv2d)]
    rows, columns = shape[height : height + 2]
    assert convolution.in_channels == np.prod(shape) // (rows * columns)
    last = next(x for x in critic.modules() if isinstance(x, nn.Linear))
    assert last.in_features == 16 * (rows - 2) * (columns - 2)


def test_a_module_that_works_in_place_leaves_the_observation():
    encoder = nn.Sequential(nn.ELU(inplace=True), nn.Linear(4, 6))
    actor, _, critic = actor_critic((VECTOR_4, CHOICE), (), encoder=encoder, shared=True)
    env = Spaces(VECTOR_4, CHOICE)
    with GymCollector(lambda: env, actor, frames_per_batch=20, value_network=critic) as collector:
        batch = collector.rollout()
    assert (batch["observation"] < -1).any()
    expected = GAE(gamma=0.9, lmbda=0.8, value_network=critic)(batch.clone())["advantage"]
    found = GAE(gamma=0.9, lmbda=0.8, value_network=None)(batch)["advantage"]
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("encoder", ["small", "impala"])
def test_networks_of_images_can_be_mapped(encoder: str):
    """torchrl's GAE and losses call them in torch.func.vmap."""
    torch.manual_seed(0)
    actor, critic = actor_critic((BITS, CHOICE), (), encoder=encoder)
    images = torch.rand(3, 6, 10, 10, 4) < 0.3
    mapped = torch.func.vmap(critic.module)(images)
    torch.testing.assert_close(mapped, critic.module(images))
    env = Spaces(BITS, CHOICE)
    with GymCollector(lambda: env, actor, frames_per_batch=20) as collector:
        batch = collector.rollout()
    options: Any = {"gamma": 0.9, "lmbda": 0.8, "value_network": critic}
    expected = GAE(**options)(batch.clone())["advantage"]
    for own in (TorchRLGAE(**options), GAE(**options, shifted=False)):
        torch.testing.assert_close(own(batch.clone())["advantage"], expected)
    losses = DualClipPPOLoss(actor, critic)(batch)
    assert losses["loss_critic"].isfinite()


def test_small_images_and_choices_train_end_to_end():
    def make() -> Any:
        return Spaces(spaces.Dict(board=BITS, level=spaces.Discrete(4)), CHOICE)

    encoders = {"board": "small", "level": nn.Linear(4, 5)}
    networks = actor_critic(make(), encoder=encoders, shared=True)
    assert_updates(networks, collect(make, networks[0]))


class Recorder(nn.Module):
    """Keeps its last input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = x
        return x.flatten(1)[:, :7].unsqueeze(-1)


def test_a_module_gets_numbers_with_one_batch_dimension():
    given = Recorder()
    networks = actor_critic((LARGE, BOX), (5,), encoder=given)
    assert not hasattr(given, "seen")
    images = torch.full((2, 3, 4, 84, 84), 51, dtype=torch.uint8)
    for network in networks:
        network(TensorDict({"observation": images}, [2, 3]))
        (own,) = [x for x in network.modules() if isinstance(x, Recorder)]
        assert own is not given
        assert own.training
        torch.testing.assert_close(own.seen, torch.full((6, 4, 84, 84), 0.2))
        assert weights(network)[0] == (5, 7)


def test_a_module_gets_choices_as_one_hot_vectors():
    actor, _ = actor_critic((PARTS, CHOICE), encoder={"level": Recorder(), "image": "small"})
    entries = {"image": torch.zeros(2, 4, 84, 84, dtype=torch.uint8), "speed": torch.zeros(2, 3)}
    actor(TensorDict(entries | {"level": torch.tensor([3, 0])}, [2]))
    (own,) = [x for x in actor.modules() if isinstance(x, Recorder)]
    assert own.seen.tolist() == [[0, 0, 0, 1], [1, 0, 0, 0]]


def test_a_module_with_batch_normalization():
    encoder = nn.Sequential(nn.Flatten(), nn.Linear(3, 4), nn.BatchNorm1d(4))
    actor, _ = actor_critic((VECTOR, CHOICE), encoder=encoder)
    assert all(x.training for x in actor.modules())
    with GymCollector(lambda: Spaces(VECTOR, CHOICE), actor, frames_per_batch=8, num_envs=4) as c:
        assert c.rollout()["action"].shape == (4, 2)


def test_a_frozen_encoder_stays_in_evaluation_mode():
    encoder = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4).eval())
    for network in actor_critic((VECTOR, CHOICE), encoder=encoder):
        modes = [x.training for x in network.modules() if isinstance(x, nn.BatchNorm1d)]
        assert modes == [False]


@pytest.mark.parametrize("shape", [(0,), (2, 0)])
def test_no_rows(shape: tuple[int, ...]):
    for encoder in (nn.Linear(3, 4), None):
        _, critic = actor_critic((VECTOR, CHOICE), encoder=encoder)
        batch = TensorDict({"observation": torch.zeros(*shape, 3)}, shape)
        assert critic(batch)["state_value"].shape == (*shape, 1)


def test_networks_of_the_meta_device_are_complete_once_they_are_loaded():
    """The bounds of bytes, too."""
    bounds = np.arange(1, 4, dtype=np.uint8)
    for high in (bounds, 200):
        space = spaces.Box(0, high, (3,), np.uint8)
        _, critic = actor_critic((space, CHOICE))
        _, empty = actor_critic((space, CHOICE), device="meta")
        empty = empty.to_empty(device="cpu")
        empty.load_state_dict(critic.state_dict())
        batch = TensorDict({"observation": torch.tensor([[1, 2, 3]], dtype=torch.uint8)}, [1])
        expected = critic(batch.clone())["state_value"]
        assert torch.equal(empty(batch)["state_value"], expected)


class AsDict(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return {"x": x}


BAD: list[Any] = [
    (PARTS, nn.Flatten(), ValueError, "is for one observation.*image.*speed.*mapping"),
    (VECTOR, AsDict(), ValueError, "encoder of 'observation' raised on floats"),
    (VECTOR, "nature", ValueError, r"is for images, and there are.*\[3\]"),
    (BITS, "nature", ValueError, r"needs an image of at least 36 x 36.*\[10, 10, 4\]"),
    (PARTS, {"picture": "nature"}, ValueError, "no observation 'picture'"),
    (PARTS, {"level": "small"}, ValueError, r"image of at least 3 x 3, and 'level' has shape \[\]"),
    (VECTOR, nn.Linear(4, 4), ValueError, r"encoder of 'observation' raised on floats.*\[1, 3\]"),
    (LARGE, "natur", ValueError, "one of .*'nature', 'impala', 'small'"),
    (LARGE, nn.Flatten, TypeError, "or a module such as"),
    (LARGE, 3, TypeError, "got 3"),
]


@pytest.mark.parametrize(("space", "encoder", "error", "words"), BAD)
def test_bad_encoders(space: Any, encoder: Any, error: Any, words: str):
    with pytest.raises(error, match=words):
        actor_critic((space, CHOICE), encoder=encoder)
