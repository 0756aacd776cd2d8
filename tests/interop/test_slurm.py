"""Scripts for Slurm: what the job has, what srun starts, and where the launcher differs."""

from pathlib import Path

import pytest

from batchscape.cli import main
from batchscape.errors import ConfigError
from batchscape.interop.check import check_configs
from batchscape.interop.slurm import Job, read_job


def directives(*options):
    return "#!/bin/bash\n" + "".join(f"#SBATCH {option}\n" for option in options)


@pytest.mark.parametrize(
    ("options", "job"),
    [
        (("--nodes=2",), Job(nodes=2)),
        (("-N 2",), Job(nodes=2)),
        (("-N2 -n8",), Job(nodes=2, ntasks=8)),
        (("--ntasks 8 --ntasks-per-node 4 # note",), Job(ntasks=8, ntasks_per_node=4)),
        (("--gpus-per-node=8",), Job(gpus_per_node=8)),
        (("--gres=gpu:4",), Job(gpus_per_node=4)),
        (("--gres=gpu",), Job(gpus_per_node=1)),
        (("--gres=gpu:a100",), Job(gpus_per_node=1)),
        (("--gres=nvme:1",), Job()),
        (("--gres=gres/gpu:4",), Job(gpus_per_node=4)),
        (("--gres=gpu:a100:2(S:0-1)",), Job(gpus_per_node=2)),
        (("--gres=nvme:1,gpu:a100:2",), Job(gpus_per_node=2)),
        (("--gpus=16 --nodes 2",), Job(nodes=2, gpus=16)),
        (("-G a100:16",), Job(gpus=16)),
        (("--gpus-per-task=1", "--cpus-per-task=6"), Job()),
        (("--nodes=2", "--nodes=3"), Job(nodes=3)),
        (("--partition=n -J nodes -t 10:00",), Job()),
    ],
)
def test_what_the_lines_ask_for(options, job):
    assert read_job("x.sh", directives(*options)) == job


def test_lines_count_up_to_the_first_command():
    text = directives("--nodes=2") + "\n# a note\n##SBATCH --nodes=9\n  #SBATCH --nodes=8\nset -e\n"
    assert read_job("x.sh", text + "#SBATCH --ntasks=4\n") == Job(nodes=2)


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--nodes=2-4", "x.sh: #SBATCH argument -N/--nodes: must be an int from 1 .*'2-4'"),
        ("--gres=gpu:a100:2,gpu:v100:2", "--gres: must be an int .*'2,2'"),
        ("--gpus=a100:2,v100:4", "--gpus: must be an int .*'2,v100:4'"),
        ("--gres=gpu:$N", "--gres: must be an int .*'\\$N'"),
        ("--ntasks=0", "--ntasks: must be an int from 1 .*'0'"),
        ("--gpus-per-node=a100:many", "--gpus-per-node: must be an int .*'many'"),
    ],
)
def test_lines_that_cannot_be_right(option, words):
    with pytest.raises(ConfigError, match=words):
        read_job("x.sh", directives(option))


def test_variables_are_those_that_slurm_sets():
    """By the manual of sbatch, and where a number follows, as the job would have it."""
    both = {"SLURM_NNODES": "2", "SLURM_JOB_NUM_NODES": "2"}
    eight = {"SLURM_NTASKS": "8", "SLURM_NPROCS": "8"}
    assert Job(nodes=2).variables == both
    assert Job(nodes=2, ntasks=8).variables == both | eight
    per_node = {"SLURM_NTASKS_PER_NODE": "4"}
    assert Job(nodes=2, ntasks_per_node=4).variables == both | eight | per_node
    one = {"SLURM_NTASKS": "4", "SLURM_NPROCS": "4"}
    assert Job(ntasks_per_node=4).variables == one | per_node, "one node, unless it says otherwise"
    gpus = {"SLURM_GPUS_ON_NODE": "4"}
    assert Job(nodes=2, gpus=8).variables == both | gpus
    assert Job(nodes=2, gpus=7).variables == both, "not as many on each node"
    assert Job(gpus_per_node=4).variables == gpus


def checked(tmp_path, text, **more):
    path = tmp_path / "train.sbatch"
    path.write_text(text)
    return check_configs([path], **more)


BATCH = "train.py --micro_batch_size 4 --gradient_accumulation_steps 2"
RUNS = {
    "srun and torchrun": (
        ("--nodes=2", "--ntasks-per-node=1", "--gres=gpu:a100:4"),
        f"srun torchrun --nnodes=$SLURM_NNODES --nproc_per_node=$SLURM_GPUS_ON_NODE {BATCH}",
        (2, 8),
    ),
    "a launcher in a variable": (
        ("--nodes=2", "--gpus-per-node=4"),
        "GPUS=4\nNODES=$SLURM_JOB_NUM_NODES\n"
        "export HEAD=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1)\n"
        'L="torchrun --nproc_per_node $GPUS --nnodes $NODES --rdzv_endpoint $HEAD:29500"\n'
        f"srun --jobid $SLURM_JOBID $L --node_rank $SLURM_PROCID {BATCH} | tee x\n",
        (2, 8),
    ),
    "GPUs counted by torchrun": (
        ("--gres=gpu:4",),
        f"torchrun --nproc_per_node gpu {BATCH}",
        (1, 4),
    ),
    "a process for each task": (
        ("-N 2", "--ntasks-per-node=4"),
        f"python prepare.py\nsrun -l python -u {BATCH}",
        (2, 8),
    ),
    "a module for each task": (("-n 6",), f"srun python -m {BATCH}", (1, 6)),
    "tasks of the step": (("-N 2", "-n 8"), f"srun -N1 -n 3 python {BATCH}", (1, 3)),
    "options of another program": (
        ("--nodes=2",),
        f"srun --ntasks=8 nice -n 10 python {BATCH}",
        (2, 8),
    ),
    "options of another program behind a switch": (
        ("--nodes=2", "--ntasks-per-node=4"),
        f"srun -l -N2 --exclusive numactl -N 1 python {BATCH}",
        (2, 8),
    ),
    "options of another program behind a value": (
        (),
        f"srun -p gpu --ntasks 8 -N 2 --mpi none xvfb-run -n 99 python {BATCH}",
        (2, 8),
    ),
    "options behind a value": (
        (),
        f"srun $MORE --jobid $ID -lp gpu -N 2 -n 8 python {BATCH}",
        (2, 8),
    ),
    "visible devices before those of the job": (
        ("--gpus-per-node=4",),
        f"CUDA_VISIBLE_DEVICES=0,1 torchrun --nproc_per_node=gpu {BATCH}",
        (1, 2),
    ),
    "a default of the script's own": (
        ("--nodes=2",),
        f"srun torchrun --nnodes=${{SLURM_NNODES:-1}} --nproc_per_node=${{GPUS:-4}} {BATCH}",
        (2, 8),
    ),
    "accelerate with all tasks": (
        ("--nodes=2", "--gpus-per-node=4"),
        "accelerate launch --multi_gpu --num_machines $SLURM_NNODES "
        f"--num_processes $((SLURM_NNODES * SLURM_GPUS_ON_NODE)) {BATCH}",
        (2, 8),
    ),
}


@pytest.mark.parametrize("name", RUNS)
def test_what_a_job_runs(name, tmp_path):
    options, command, (nodes, devices) = RUNS[name]
    result = checked(tmp_path, directives(*options) + command)
    assert [one.message for one in result.findings if one.severity == "error"] == []
    geometry = result.running.geometry
    assert (geometry.nodes, geometry.data_parallel_size) == (nodes, devices)
    assert geometry.global_batch_size == devices * 4 * 2


FAULTY = {
    "job-nodes": (
        ("--nodes=4",),
        f"srun torchrun --nnodes=2 --nproc_per_node=4 {BATCH}",
        "nnodes 2 is not the 4 nodes of the job",
    ),
    "job-tasks": (
        ("--nodes=2", "--ntasks-per-node=4"),
        f"srun torchrun --nnodes=2 --nproc_per_node=4 {BATCH}",
        "srun starts 4 tasks on a node",
    ),
    "visible-devices": (
        ("--nodes=2", "--gpus-per-node=4"),
        f"srun torchrun --nnodes=2 --nproc_per_node=8 {BATCH}",
        "starts 8 processes on a machine where the job names 4 devices",
    ),
}


@pytest.mark.parametrize("rule", FAULTY)
def test_a_launcher_that_does_not_fit_its_job_is_found(rule, tmp_path):
    options, command, words = FAULTY[rule]
    (finding,) = checked(tmp_path, directives(*options) + command).findings
    assert (finding.rule, finding.severity) == (rule, "error")
    assert words in finding.message


def test_tasks_of_a_job_are_spread_over_its_nodes(tmp_path):
    command = f"srun torchrun --nnodes=2 --nproc_per_node=4 {BATCH}"
    assert checked(tmp_path, directives("-N 2", "-n 2") + command).findings == ()
    # One task a node of the step, whatever the job could have.
    wide = directives("--nodes=4", "--ntasks-per-node=8")
    four = command.replace("srun", "srun --ntasks=4").replace("nnodes=2", "nnodes=4")
    assert checked(tmp_path, wide + four).findings == ()
    (finding,) = checked(tmp_path, directives("-N 2", "-n 4") + command).findings
    assert "srun starts 2 tasks on a node" in finding.message


def test_a_launcher_on_the_first_node_alone_is_a_warning(tmp_path):
    command = f"torchrun --nproc_per_node=4 {BATCH}"
    (finding,) = checked(tmp_path, directives("--nodes=2") + command).findings
    assert (finding.rule, finding.severity) == ("job-nodes", "warning")
    assert "the others stay idle" in finding.message
    two = command.replace("--np", "--nnodes=2 --np")
    (finding,) = checked(tmp_path, directives("--nodes=1") + two).findings
    assert (finding.rule, finding.severity) == ("job-nodes", "error")


@pytest.mark.parametrize("starter", ["", "mpirun -np 4 "])
def test_tasks_of_the_job_are_those_of_srun_alone(starter, tmp_path):
    job = directives("--ntasks-per-node=4")
    assert checked(tmp_path, f"{job}{starter}python {BATCH}").running.devices is None
    command = f"{job}{starter}torchrun --nproc_per_node=2 {BATCH}"
    assert checked(tmp_path, command).findings == ()


def test_a_variable_that_no_line_gives_is_named(tmp_path):
    text = directives("--gpus=8") + f"torchrun --nnodes=$SLURM_NNODES {BATCH}"
    words = r"--nnodes \$\{SLURM_NNODES\} is known only once .* in its #SBATCH lines"
    with pytest.raises(ConfigError, match=words):
        checked(tmp_path, text)
    with pytest.raises(ConfigError, match=r"\(srun\) argument -n/.* given '\$\{N\}'"):
        checked(tmp_path, f"srun -n $N torchrun {BATCH}")


@pytest.mark.parametrize(
    ("options", "processes"),
    [
        (("--gpus-per-task=4 --ntasks-per-node=1", "--nodes=2"), "SLURM_GPUS_ON_NODE"),
        (("--nodes=2 --gpus-per-node=4",), "SLURM_GPUS_PER_NODE"),
        (("--nodes=2 --gpus=8",), "SLURM_GPUS"),
        (("--ntasks=16 --ntasks-per-node=8",), "SLURM_NNODES"),
    ],
)
def test_slurm_sets_what_a_script_has_a_default_for(options, processes, tmp_path):
    command = f"srun torchrun --nproc_per_node=${{{processes}:-1}} {BATCH}"
    with pytest.raises(ConfigError, match=rf"\$\{{{processes}:-1\}} is known only once"):
        checked(tmp_path, directives(*options) + command)
    assert checked(tmp_path, command).running.devices.value == 1, "a script for no job"


def test_devices_that_only_running_would_name_are_not_those_of_the_job(tmp_path):
    command = f"CUDA_VISIBLE_DEVICES=$IDS torchrun --nproc_per_node=gpu {BATCH}"
    assert checked(tmp_path, directives("--gpus-per-node=4") + command).running.devices is None


OWN = "torchrun --nproc_per_node 2 train.py --batch-size 4 --grad-accum=8"
MICRO, ACCUMULATION = "batch-size=micro_batch_size", "grad_accum=gradient_accumulation_steps"


def test_own_arguments_stand_for_what_the_user_says(capsys):
    assert main(["check-config", "--", *OWN.split()]) == 0
    assert "another argument of the script does: --flag NAME=micro_batch_size" in " ".join(
        capsys.readouterr().out.split()
    )
    for named in ([f"--flag=--{ACCUMULATION}"], ["--flag", f"--{ACCUMULATION}"]):
        flags = ["--flag", MICRO, *named]
        assert main(["check-config", *flags, "--", *OWN.split()]) == 0
        assert "= 2 x 4 x 8 = 64" in " ".join(capsys.readouterr().out.split())
    wrong = ["--flag", "total=global_batch_size", "--", *OWN.split(), "--total", "32"]
    assert main(["check-config", *flags, *wrong]) == 1
    output = " ".join(capsys.readouterr().out.split())
    assert "total 32, " in output
    assert "(32 is not 64)" in output
    assert "batch_size 4" in output, "the user's own word"


ACC = "acc=gradient_accumulation_steps"


@pytest.mark.parametrize(
    ("command", "flags", "parts"),
    [
        ("python t.py -b 4 --acc 2", ("b=micro_batch_size", ACC), (4, 2)),
        ("python t.py -b=4 --acc=2", ("-b=micro_batch_size", ACC), (4, 2)),
        ("python t.py train.bs=4 +acc=2", ("train.bs=micro_batch_size", ACC), (4, 2)),
        ("python t.py --bs 1 --bs 5 --acc 2", ("bs=micro_batch_size", ACC), (5, 2)),
        # A known name counts where no flag says otherwise, and one that a flag takes does not.
        ("python t.py --micro_batch_size 3 --acc 2", (ACC,), (3, 2)),
        (
            "python t.py --micro_batch_size 24 --acc 4",
            ("micro-batch-size=global_batch_size", ACC),
            (3, 4),
        ),
        (
            "python t.py --train_batch_size 24 --micro_batch_size 3",
            ("train_batch_size=global_batch_size",),
            (3, 4),
        ),
    ],
)
def test_ways_to_write_an_argument(command, flags, parts):
    geometry = check_configs([], command.split(), devices=2, flags=flags).running.geometry
    assert (geometry.micro_batch_size, geometry.gradient_accumulation_steps) == parts


@pytest.mark.parametrize(
    ("flags", "command", "words"),
    [
        (("batch-size",), OWN, "--flag is NAME=WORD, .* given 'batch-size'"),
        (("=micro_batch_size",), OWN, "--flag is NAME=WORD"),
        (("batch-size=batch",), OWN, "one of micro_batch_size, gradient_acc.* given 'batch-size=b"),
        ((MICRO, "--batch_size=global_batch_size"), OWN, "no NAME and no WORD may come twice"),
        ((MICRO, "grad-accum=micro_batch_size"), OWN, "no NAME and no WORD may come twice"),
        (("bs=micro_batch_size",), OWN, "names --bs, .* it has --batch_size, --grad_accum"),
        ((MICRO,), "", "give one launch command"),
        ((MICRO,), OWN.replace("4", "four"), "batch_size must be an int .*'four'"),
        ((MICRO,), OWN.replace("4", "$X"), r"--batch_size \$X is known only once"),
        (("bs=global_batch_tokens",), OWN, "global_batch_tokens and sequence_length together"),
    ],
)
def test_flags_that_cannot_be_right(flags, command, words, tmp_path):
    path = tmp_path / "ds.json"
    path.write_text('{"train_batch_size": 8}')
    with pytest.raises(ConfigError, match=words):
        check_configs([path], command.split(), flags=flags)


def test_own_arguments_beside_a_json_are_not_taken_for_the_trainers(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text('{"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 8}')
    command = [*OWN.split(), "--deepspeed", str(path)]
    (finding,) = check_configs([], command, flags=(MICRO, ACCUMULATION)).findings
    assert finding.rule == "micro-batch"
    assert "train_micro_batch_size_per_gpu 2 is not" in finding.message
    assert "DeepSpeed takes that of the JSON" in finding.message
    assert finding.fix == (
        "make both equal: train_micro_batch_size_per_gpu 4 in the DeepSpeed JSON, or batch_size 2"
    )


def test_a_json_that_says_nothing_is_given_the_number_and_not_auto(tmp_path, monkeypatch):
    """Were it "auto", the launcher's own accumulation would decide, and not the script's."""
    monkeypatch.chdir(tmp_path)
    path = Path("ds.json")
    path.write_text('{"train_micro_batch_size_per_gpu": 4}')
    command = (
        f"accelerate launch --use_deepspeed --deepspeed_config_file {path} --num_processes 2 "
        "t.py --train_batch_size 4 --gradient_accumulation_steps 8"
    )
    finding = {one.rule: one for one in check_configs([], command.split()).findings}
    assert '"gradient_accumulation_steps": 8' in finding["accumulation-missing"].fix
    path.write_text('{"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 8}')
    assert check_configs([], command.split()).is_consistent
