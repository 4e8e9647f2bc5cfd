"""Tasks of the learning benchmark, with the settings of both arms, and the setting for MuJoCo.

The settings are those of ``hyperparams/ppo.yml`` of DLR-RM/rl-baselines3-zoo at commit
22e3ff2450fd92033f7f032915e1f64894a09584, for the task or its nearest older version. Both arms draw
from a normal distribution instead of gSDE. The last column is the setting of ``mujoco``, and of
``tutorials/mujoco_ppo.py``.
"""

from __future__ import annotations

import ast
import math
from types import SimpleNamespace as Task

NAMES = ("CartPole-v1", "Pendulum-v1", "LunarLanderContinuous-v3", "InvertedDoublePendulum-v5")
NAMES += ("HalfCheetah-v5", "Hopper-v5", "MuJoCo")
# ``steps`` are of each environment in a batch; ``bar`` is the final return to reach; ``lr_falls``
# and ``clip_falls``: linearly to 0; ``normalizes`` observations and rewards; ``is_orthogonal`` is
# about initial weights; ``eps`` is Adam's. The zoo's minibatch of the double pendulum, 512, is
# larger than its batch of 128.
SETTINGS = """
frames         100_000  100_000  1_000_000  1_000_000    1_000_000    1_000_000    1_000_000
seeds          5        5        5          5            3            3            5
bar            490      -200     200        9_000        -            -            -
num_envs       8        4        16         1            1            1            1
steps          32       1_024    1_024      128          512          512          2_048
minibatch      256      64       64         128          64           32           64
epochs         20       10       4          10           20           5            10
gamma          0.98     0.9      0.999      0.98         0.98         0.999        0.99
lmbda          0.8      0.95     0.98       0.8          0.92         0.99         0.95
learning_rate  1e-3     1e-3     3e-4       0.000155454  2.0633e-05   9.80828e-05  3e-4
clip           0.2      0.2      0.2        0.4          0.1          0.2          0.2
entropy        0.0      0.0      0.01       1.05057e-06  0.000401762  0.00229519   0.0
critic         0.5      0.5      0.5        0.695929     0.58096      0.835671     0.25
max_grad_norm  0.5      0.5      0.5        0.5          0.8          0.7          0.5
lr_falls       True     False    False      False        False        False        True
clip_falls     True     False    False      False        False        False        False
eps            1e-5     1e-5     1e-5       1e-5         1e-5         1e-5         1e-8
normalizes     False    False    False      True         True         True         True
cells          (64,64)  (64,64)  (64,64)    (64,64)      (256,256)    (256,256)    (64,64)
activation     "Tanh"   "Tanh"   "Tanh"     "Tanh"       "ReLU"       "ReLU"       "Tanh"
log_std        0.0      0.0      0.0        0.0          -2.0         -2.0         -0.5
is_orthogonal  True     True     True       True         False        False        True
"""


def _tasks() -> dict[str, Task]:
    lines = [line.split() for line in SETTINGS.strip().splitlines()]
    settings = {
        name: [math.nan if x == "-" else ast.literal_eval(x) for x in values]
        for name, *values in lines
    }
    return {
        env: Task(env=env, **{name: values[i] for name, values in settings.items()})
        for i, env in enumerate(NAMES)
    }


TASKS = _tasks()
MUJOCO = TASKS.pop("MuJoCo")
