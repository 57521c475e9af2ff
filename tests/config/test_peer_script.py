"""Assignments that `slurm-rlhf migrate` reads out of a script: those in the branches that the script takes."""

from __future__ import annotations

from slurm_rlhf.config.keys import changed, get
from slurm_rlhf.config.migrate import translate
from slurm_rlhf.config.schema import Config

BRANCHES = """
GPUS=${GPUS:-}
RACK=${RACK:-}
KIND=${KIND:-$(find_out)}
WIDTH=${WIDTH:-}
EXTRA=()
MORE="
    actor_rollout_ref.actor.entropy_coeff=0.25 \\
    actor_rollout_ref.actor.clip_ratio_high=0.3"
case "${KIND}" in
    gpu)
        WIDTH=${WIDTH:-4}
        case "${RACK}" in
            dense) GPUS=${GPUS:-3}; EXTRA+=(actor_rollout_ref.rollout.enforce_eager=True) ;;
            *)
                GPUS=${GPUS:-16}
                ;;
        esac
        ;;
    npu | other)
        EXTRA+=(
            actor_rollout_ref.rollout.gpu_memory_utilization=0.1
        )
        ;;
esac
if [ "${KIND}" = npu ] && [ "${KIND}" != gpu ]; then
    SAMPLES=1
elif [[ -z "${NOT_SET}" || -n "${GPUS}" ]]; then SAMPLES=6
else SAMPLES=2
fi
if [ "${KIND}" = npu ]; then
    NAMES=(
        a
        $b)
fi
if [ -n "${NOT_SET}" ]; then EXTRA+=(data.train_batch_size=2); fi
RUN=(python2)
RUN=(python3)
"${RUN[@]}" -m verl.trainer.main_ppo trainer.n_gpus_per_node=${GPUS} trainer.total_epochs=7 "${EXTRA[@]}" \\
    actor_rollout_ref.rollout.tensor_model_parallel_size=${WIDTH} actor_rollout_ref.rollout.n=$SAMPLES model_engine=x \\
    $MORE trainer.save_freq=${FREQUENCY:-$((2 + 3))} trainer.nnodes= reward.custom_reward_function.path=/f.py
"""


def test_the_branches_that_a_script_takes_are_read() -> None:
    """Where the choice of a branch is unknown, the first one counts; an empty variable takes the next value."""
    found = translate(BRANCHES, peer="verl")
    expected = {
        "actor.num_gpus_per_node": 16,
        "actor.num_nodes": 1,
        "vllm.tensor_parallel_size": 4,
        "vllm.num_engines": 4,
        "vllm.enforce_eager": False,
        "vllm.gpu_memory_utilization": 0.5,  # verl's default
        "rollout.n_samples_per_prompt": 6,
        "rollout.batch_size": 1024,
        "train.num_episodes": 7,
        "ckpt.save_steps": 5,
        "actor.entropy_coef": 0.25,
        "actor.eps_clip_low_high": [0.2, 0.3],  # the lower one is verl's default
        "reward.remote_url": "/f.py",
    }
    config = changed(Config(), found.values)
    assert {name: get(config, name) for name in expected} == expected
    assert "model_engine x: DeepSpeed trains: ds.zero_stage" in found.left_out
