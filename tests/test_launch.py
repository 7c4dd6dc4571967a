"""A job that gemmtune launches is the job as it was: real processes, most with a tiny torch.

The hook only watches for the import of `torch`, so a stand-in of that name starts in milliseconds
what the real one would start in seconds; torchrun runs with the real one.
"""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from gemmtune.errors import JobError, UsageError
from gemmtune.job import launch

ROOT = Path(launch.__file__).parents[2]
ENTRY = """
import json, os, sys

def record(options, out):
    import gemmtune, torch
    what = {"rank": 0, "pid": os.getpid(), "options": options, "torch": torch.__version__,
            "gemmtune": gemmtune.__file__, "argv": sys.argv}
    with open(os.path.join(out, f"rank-{os.getpid()}.json"), "w") as f:
        json.dump(what, f)

def fail(options, out):
    raise RuntimeError("no luck\\non two lines")

def real(options, out):
    from gemmtune.job import files, steps
    steps.on_step(lambda i: files.save(out, {"step": i}))
"""
DRIVER = """
import json, sys
sys.path.append(sys.argv[1])
from gemmtune.job import launch
argv, entry, options, out = json.loads(sys.argv[2])
sys.exit(launch.run(argv, entry, options, out))
"""


@pytest.fixture
def job(tmp_path):
    """Starts words as a job in tmp_path; `job.out` is the folder of its files."""
    return Job(tmp_path)


class Job:
    def __init__(self, folder):
        self.folder = folder
        self.out = folder / "out"
        self.write("stub/torch/__init__.py", "__version__ = 'stand-in'\n")
        self.write("entry/entry_of_test.py", ENTRY)
        self.path = [str(folder / "entry"), str(folder / "stub")]

    def write(self, name, text):
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
        return path

    def popen(self, *argv, entry="record", out=None, **kwargs):
        # -I: the driver finds gemmtune in the repository; its job finds it by the hook alone.
        words = [*map(str, argv)], f"entry_of_test:{entry}", {"a": [1, None]}, str(out or self.out)
        driver = [sys.executable, "-I", "-c", DRIVER, str(ROOT), json.dumps(words)]
        kwargs = {
            "cwd": self.folder,
            "env": self.environment(),
            "stdout": -1,
            "stderr": -1,
            **kwargs,
        }
        return subprocess.Popen(driver, **kwargs)

    def environment(self):
        return {**os.environ, "PYTHONPATH": os.pathsep.join(self.path)}

    def run(self, *argv, entry="record", out=None, stdin=b"", **kwargs):
        process = self.popen(*argv, entry=entry, out=out, stdin=-1, **kwargs)
        stdout, stderr = process.communicate(stdin, timeout=60)
        return process.returncode, stdout, stderr

    def ranks(self):
        return launch.read_ranks(self.out)


def python(*words):
    return [sys.executable, *words]


def test_script_keeps_arguments_input_output_and_starts_the_entry_once(job):
    job.write(
        "train.py",
        """
        import sys, torch, importlib, torch as again
        data = sys.stdin.buffer.read()
        sys.stdout.buffer.write(data[::-1] + repr(sys.argv).encode())
        print("to stderr", file=sys.stderr)
        """,
    )
    code, out, err = job.run("train.py", "--lr", "1 e", "--", "-x", "", stdin=b"\x00\xff\n1")
    assert (code, err) == (0, b"to stderr\n")
    assert out == b"1\n\xff\x00" + repr(["train.py", "--lr", "1 e", "--", "-x", ""]).encode()
    (rank,) = job.ranks()
    assert rank["options"] == {"a": [1, None]}
    assert rank["torch"] == "stand-in"
    assert Path(rank["gemmtune"]) == ROOT / "gemmtune" / "__init__.py"


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("sys.exit(0)", 0),
        ("sys.exit(3)", 3),
        ("raise ValueError('x')", 1),
        ("os._exit(77)", 77),
        ("os.kill(os.getpid(), 9)", 128 + 9),
        ("os.kill(os.getpid(), 15); time.sleep(9)", 128 + 15),
    ],
)
def test_exit_code_is_the_jobs(job, body, code):
    job.write("train.py", f"import os, sys, time, torch\n{body}\n")
    assert job.run("train.py")[0] == code
    assert len(job.ranks()) == 1


def test_module_of_a_package(job):
    job.write("pkg/__init__.py", "")
    job.write("pkg/train.py", "import torch, sys; print(sys.argv[1:], __name__, __package__)")
    code, out, _ = job.run(*python("-m", "pkg.train", "-n", "2"))
    assert (code, out) == (0, b"['-n', '2'] __main__ pkg\n")
    assert len(job.ranks()) == 1


SHOW = """
import json, sys
{first}
try:
    import sitecustomize
    site = getattr(sitecustomize, "WHO", "?")
except ImportError as e:
    site = repr(e)
print(json.dumps([sys.path, site, "gemmtune" in sys.modules, sorted(sys.modules)]))
"""


def plain(job, *argv):
    """The same words without gemmtune."""
    env = job.environment()
    return subprocess.run(argv, cwd=job.folder, env=env, capture_output=True, check=True)


@pytest.mark.parametrize("flags", [[], ["-P"], ["-s"]])
def test_path_modules_and_sitecustomize_of_a_job_without_torch_are_its_own(job, flags):
    if flags == ["-P"] and sys.version_info < (3, 11):
        pytest.skip("python -P came with 3.11")
    job.write("show.py", SHOW.format(first=""))
    words = python(*flags, "show.py")
    code, out, err = job.run(*words)
    assert (code, err) == (0, b"")
    assert out == plain(job, *words).stdout
    with pytest.raises(JobError, match="no Python process of it imported torch"):
        job.ranks()


def test_gemmtune_is_found_by_the_hook_and_is_not_put_on_the_path(job):
    job.write("show.py", SHOW.format(first="import torch"))
    path, _, started, _ = json.loads(job.run(*python("show.py"))[1])
    assert started
    assert path == json.loads(plain(job, *python("show.py")).stdout)[0]
    assert str(ROOT) not in path
    assert len(job.ranks()) == 1


@pytest.mark.parametrize("flag", ["-I", "-E", "-S"])
def test_python_that_ignores_the_hook_runs_as_it_is(job, flag):
    job.write("train.py", "print('ran')")
    assert job.run(*python(flag, "train.py")) == (0, b"ran\n", b"")
    with pytest.raises(JobError, match="-I, -S and -E"):
        job.ranks()


def test_another_sitecustomize_runs_too(job):
    job.path.insert(0, str(job.folder / "theirs"))
    job.write("theirs/sitecustomize.py", "WHO = 'theirs'; import sys; sys.path.append('/added')")
    job.write("show.py", SHOW.format(first="import torch"))
    path, site, started, _ = json.loads(job.run(*python("show.py"))[1])
    assert (site, started, path[-1]) == ("theirs", True, "/added")
    assert len(job.ranks()) == 1


def test_a_sitecustomize_may_import_torch(job):
    job.path.insert(0, str(job.folder / "theirs"))
    job.write("theirs/sitecustomize.py", "import torch; WHO = 'theirs'")
    job.write("show.py", SHOW.format(first=""))
    assert json.loads(job.run(*python("show.py"))[1])[1:3] == ["theirs", True]
    assert len(job.ranks()) == 1


@pytest.mark.parametrize("body", ["import nosuch", "1/0"])
def test_a_sitecustomize_that_fails_is_reported_as_without_gemmtune(job, body):
    job.path.insert(0, str(job.folder / "theirs"))
    job.write("theirs/sitecustomize.py", body)
    job.write("train.py", "import torch")
    code, _, err = job.run(*python("train.py"))
    assert code == 0
    assert err == plain(job, *python("train.py")).stderr != b""
    assert len(job.ranks()) == 1


def test_spawned_forked_and_started_processes_are_covered(job):
    job.write(
        "train.py",
        """
        import multiprocessing, os, subprocess, sys

        def work():
            import torch

        if __name__ == "__main__":
            for method in ("spawn", "fork", "forkserver"):
                p = multiprocessing.get_context(method).Process(target=work)
                p.start(); p.join()
                assert p.exitcode == 0
            subprocess.run([sys.executable, "-c", "import torch"], check=True)
        """,
    )
    assert job.run("train.py")[::2] == (0, b"")
    assert len({r["pid"] for r in job.ranks()}) == 4


def test_a_fork_after_the_import_does_not_start_again(job):
    job.write("train.py", "import torch, os\nif not os.fork(): import torch\nelse: os.wait()\n")
    assert job.run("train.py")[0] == 0
    assert len(job.ranks()) == 1


def test_torch_imported_by_several_threads_at_once(job):
    job.write(
        "train.py",
        """
        import importlib, sys, threading
        sys.setswitchinterval(1e-6)
        go = threading.Barrier(9)
        failed = []
        names = ["torch", "wave", "sndhdr", "chunk", "colorsys", "fractions", "statistics", "torch"]

        def load(name):
            go.wait()
            try:
                importlib.import_module(name)
            except ImportError as e:
                if name == "torch" or e.name != name:
                    failed.append(e)

        threads = [threading.Thread(target=load, args=(n,)) for n in names]
        for t in threads: t.start()
        go.wait()
        for t in threads: t.join()
        sys.exit(len(failed))
        """,
    )
    for _ in range(3):
        assert job.run("train.py")[::2] == (0, b"")
        assert len(job.ranks()) == 1  # and the files of the run before are gone


def test_an_import_of_torch_that_fails_can_be_tried_again(job):
    job.write(
        "stub/torch/__init__.py",
        "import os\nif not os.path.exists('ready'): raise OSError('libtorch: no')\n"
        "__version__ = 'second'\n",
    )
    job.write(
        "train.py",
        """
        try:
            import torch
        except OSError as e:
            print(e)
        open("ready", "w").close()
        import torch
        print(type(torch.__spec__.loader).__name__, vars(torch.__spec__.loader).keys())
        """,
    )
    code, out, err = job.run("train.py")
    assert (code, err) == (0, b"")
    assert out.splitlines()[0] == b"libtorch: no"
    assert b"exec_module" not in out
    assert [r["torch"] for r in job.ranks()] == ["second"]


def test_a_job_without_any_torch_sees_the_usual_error(job):
    job.path.remove(str(job.folder / "stub"))
    job.write("torchless/torch.txt", "")
    job.write(
        "train.py",
        """
        import sys
        sys.path = [p for p in sys.path if "site-packages" not in p]
        try:
            import torch
        except ModuleNotFoundError as e:
            print(e.name)
        """,
    )
    assert job.run("train.py") == (0, b"torch\n", b"")


def test_an_entry_that_raises_lets_the_job_go_on_with_one_line(job):
    job.write("train.py", "import torch; print('trained')")
    code, out, err = job.run("train.py", entry="fail")
    assert (code, out) == (0, b"trained\n")
    assert err == b"gemmtune: RuntimeError: no luck on two lines: the job goes on as it is\n"


def test_an_entry_that_cannot_be_imported_lets_the_job_go_on(job):
    job.write("train.py", "import torch; print('trained')")
    code, out, err = job.run("train.py", entry="nosuch")
    assert (code, out) == (0, b"trained\n")
    assert err.count(b"\n") == 1
    assert b"nosuch" in err


def test_relative_out_and_a_job_that_changes_folder(job):
    job.write("train.py", "import os\nos.chdir('/')\nimport torch\n")
    assert job.run("train.py", out="there/of/it")[0] == 0
    assert len(launch.read_ranks(job.folder / "there" / "of" / "it")) == 1


def test_script_in_another_folder(job):
    job.write("deep/er/train.py", "import torch, helper, sys; print(sys.path[0])")
    job.write("deep/er/helper.py", "")
    code, out, _ = job.run("deep/er/train.py")
    assert (code, out.decode().strip()) == (0, str(job.folder / "deep" / "er"))


def test_executable_script_runs_by_its_own_first_line(job):
    script = job.write("train.py", "#!/bin/sh\necho shell $1\n")
    script.chmod(0o755)
    assert job.run("./train.py", "x")[:2] == (0, b"shell x\n")


def test_executable_script_without_a_path_gets_this_python(job):
    job.write("train.py", "import torch, sys; print(sys.executable)").chmod(0o755)
    assert job.run("train.py")[:2] == (0, sys.executable.encode() + b"\n")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "write the job after --"),
        (["nosuchprogram"], "'nosuchprogram' is not found"),
        (["/"], "'/' is not found"),
    ],
)
def test_a_job_that_cannot_be_started_says_why(argv, message, tmp_path):
    with pytest.raises(UsageError, match=message):
        launch.run(argv, "a:b", {}, tmp_path)


def test_a_program_of_another_environment_is_named_with_the_one_beside_this_python(
    tmp_path, monkeypatch
):
    beside = Path(sys.executable).with_name("python")
    monkeypatch.setenv("PATH", str(beside.parent))
    assert launch.elsewhere(["python", "train.py"]) is None
    (tmp_path / "python").symlink_to(beside)  # as a venv's: another folder, the same file
    monkeypatch.setenv("PATH", f"{tmp_path}:{beside.parent}")
    why = launch.elsewhere(["python", "train.py"])
    assert why is not None
    assert str(tmp_path / "python") in why and str(beside) in why
    assert launch.elsewhere(["train.py"]) is None  # gets this Python


def test_a_file_that_is_no_program_says_why(job, tmp_path):
    job.write("data", "\0not a program").chmod(0o755)
    with pytest.raises(JobError, match=r"cannot start the job: .*data: Exec format error"):
        launch.run([str(tmp_path / "data")], "a:b", {}, tmp_path)


def test_an_out_that_cannot_be_made_says_so_before_the_job_starts(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(JobError, match="cannot write to the folder"):
        launch.run([sys.executable, "-c", "print(1)"], "a:b", {}, tmp_path / "file" / "out")


WAITING = """
import signal, sys, time, torch
seen = []
{handlers}
open("ready", "w").close()
for _ in range(200):
    time.sleep(0.02)
    if seen:
        time.sleep(0.2)
        open("seen", "w").write(str(len(seen)))
        sys.exit(5)
"""


def signalled(job, handlers, send):
    job.write("train.py", WAITING.format(handlers=handlers))
    process = job.popen("train.py", start_new_session=True)
    for _ in range(500):
        if (job.folder / "ready").exists():
            break
        time.sleep(0.02)
    send(process.pid)
    process.communicate(timeout=30)
    return process.returncode


def test_ctrl_c_reaches_the_job_once(job):
    handler = "signal.signal(signal.SIGINT, lambda *_: seen.append(1))"
    code = signalled(job, handler, lambda pid: os.killpg(pid, signal.SIGINT))
    assert (code, (job.folder / "seen").read_text()) == (5, "1")


def test_ctrl_c_ends_a_job_that_does_not_mind_it(job):
    code = signalled(job, "", lambda pid: os.killpg(pid, signal.SIGINT))
    assert code == 128 + signal.SIGINT
    assert len(job.ranks()) == 1


def test_sigterm_reaches_the_job_once(job):
    handler = "signal.signal(signal.SIGTERM, lambda *_: seen.append(1))"
    code = signalled(job, handler, lambda pid: os.kill(pid, signal.SIGTERM))
    assert (code, (job.folder / "seen").read_text()) == (5, "1")


def test_sigterm_ends_a_job_that_does_not_mind_it(job):
    code = signalled(job, "", lambda pid: os.kill(pid, signal.SIGTERM))
    assert code == 128 + signal.SIGTERM


def test_handlers_of_the_caller_come_back(job, tmp_path):
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    assert launch.run([sys.executable, "-c", ""], "a:b", {}, tmp_path / "out") == 0
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


TRAIN = """
import os, sys
import torch, torch.distributed as dist

def main():
    dist.init_process_group("gloo")
    p = torch.nn.Parameter(torch.ones(2))
    p.grad = torch.ones(2)
    optimizer = torch.optim.SGD([p], lr=0.1)
    for _ in range(3):
        optimizer.step()
    dist.destroy_process_group()

def spawned(rank):
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    store = dist.FileStore("store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    globals()["dist"].init_process_group = lambda *_: None
    main()

if __name__ == "__main__":
    if "spawn" in sys.argv:
        torch.multiprocessing.spawn(spawned, nprocs=2)
    else:
        main()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [["torchrun", "--standalone", "--nproc-per-node", "2", "train.py"], ["train.py", "spawn"]],
)
def test_every_rank_of_torchrun_and_of_spawn_leaves_its_file(job, words):
    job.path.remove(str(job.folder / "stub"))
    job.write("train.py", TRAIN)
    code, _, err = job.run(*words, entry="real")
    assert code == 0, err.decode()
    ranks = job.ranks()
    assert [(r["rank"], r["world"], r["step"]) for r in ranks] == [(0, 2, 2), (1, 2, 2)]
    assert all(r["local_world"] == 2 and r["threads"] >= 1 for r in ranks)


@pytest.mark.slow
def test_a_folder_that_cannot_be_written_costs_one_line(job):
    job.path.remove(str(job.folder / "stub"))
    job.write(
        "train.py",
        "import os; os.rmdir('out'); open('out', 'w')\n"
        + TRAIN.replace('dist.init_process_group("gloo")', "").replace(
            "dist.destroy_process_group()", "print(1)"
        ),
    )
    code, out, err = job.run("train.py", entry="real")
    assert (code, out) == (0, b"1\n")
    lines = [line for line in err.decode().splitlines() if line.startswith("gemmtune:")]
    assert len(lines) == 1
    assert "cannot write to" in lines[0]
    assert "the job goes on" in lines[0]
