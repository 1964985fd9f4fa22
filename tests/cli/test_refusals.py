"""What commands refuse by themselves: one line on stderr, before anything is written.

What the rooms refuse (stores, splits, grids, layouts, partners, models) is tested there; here a row or two of each
command shows that such a mistake ends it in the same way.
"""

import shlex

import pytest
import torch

from normal_guidance.base.errors import UserError
from normal_guidance.cli.options import choose_execution
from normal_guidance.sweep.config import Execution
from small_command import nguide, output_of, refusal

GUIDED = "is guided; add one of ng, mhng to --methods, or leave the option out"
NO_DEVICE = "this machine or torch has none; use c"

REFUSED = {
    "sweep STORE -o OUT": {
        "--methods abml": "method 'abml' is unknown (did you mean 'abmil'?); nguide methods lists them",
        "--methods ng,": "--methods ng,: '' is empty or given twice",
        "--methods abmil --divergence foo": f"--divergence foo: none of abmil {GUIDED}",
        "--methods abmil,mean --guidance-weight 1": f"--guidance-weight 1: none of abmil, mean {GUIDED}",
        "--methods mean --no-renormalize": f"--no-renormalize: none of mean {GUIDED}",
        "--least-width wide": "--least-width wide: give slices, as 1.5, or millimetres, as 8mm",
        "--methods mean --regularizer ng": "--regularizer ng: none of mean has attention to regularize",
        "--regularizer bell": "--regularizer 'bell' is unknown; choose one of clusters, distance, entropy, ng",
        "--seeds 0,x": "--seeds 0,x: 'x' is not a whole number; write 1,2,3",
        "--seeds ''": "--seeds : '' is not a whole number",
        "--lr fast": "--lr fast: 'fast' is not a number",
        "--lr inf": "lr is inf; it must be",
        "--divergence ''": "--divergence : '' is empty or given twice",
        "--device abacus": "--device abacus is unknown",
        "--device ''": "--device is unknown; give cpu, cuda or cuda:1",
        "--device meta": f"--device meta: {NO_DEVICE}pu",
        "--device cuda:9": f"--device cuda:9: {NO_DEVICE}",
        "--device cpu:1": f"--device cpu:1: {NO_DEVICE}pu",
        "--engine fast": "--engine 'fast' is unknown; choose one of auto, packed, recorded, compiled",
        "--engine compiled --device cpu": "--engine compiled is for CUDA; on cpu use auto or packed",
        "--precision int4": "--precision 'int4' is unknown; choose one of auto",
        "--save-minutes 0": "--save-minutes is 0; it must be above 0",
        "--save-minutes nan": "--save-minutes is nan; it must be above 0",
        "--track paper": "--track 'paper' is unknown; choose one of",
        "--split nowhere.csv": "--split nowhere.csv is not a file; ",
    },
    "experiment STORE --dataset few -o OUT": {
        "--methods mean --sensitivity": "--sensitivity: none of mean is guided; add one of ng",
        "--methods mean --modes 2": f"--modes 2: none of mean {GUIDED}",
        "--divergence forward_kl,reverse_kl": "--divergence forward_kl,reverse_kl: this command takes one value; give",
        "--methods ng,nng": "method 'nng' is unknown; choose among centered_gaussian, ",
        "--index nowhere": "nowhere/manifest.parquet is not there; run nguide index first",
    },
    "reproduce": {
        "synthetic -o OUT": "dataset 'synthetic' is unknown; choose one of semi-synthetic, lidc-positions",
        "semi-synthetic -o OUT --seeds 7": "semi-synthetic has no seed 7; choose among 1001, 2001, 3001",
        "semi-synthetic -o OUT --methods mean --modes 2": f"--modes 2: none of mean {GUIDED}",
        "semi-synthetic -o OUT --root x": "--root x: semi-synthetic is drawn, not read; leave it out, or choose pros",
        "semi-synthetic -o OUT --encoder x": "--encoder x: semi-synthetic is drawn",
        "semi-synthetic -o OUT --sensitivity --divergence forward_kl": "--divergence forward_kl: --sensitivity trains",
        "prostatex -o OUT": "prostatex is read, not drawn: give its folder (--root DIR), the clone of github.com/rcuo",
        "prostatex -o OUT --root nowhere": "nowhere is not a folder; give the clone of github.com/rcuocolo",
        "prostatex -o OUT --root x --methods best": "method 'best' is unknown; choose among",
        "prostatex -o OUT --root x --sensitivity": "--sensitivity: prostatex is made without it; leave it out",
        "prostatex -o OUT --root x --initialisations 2": "--initialisations 2: only the tables of drawn data have",
    },
    "index": {
        "rsna-pet SCANS -o OUT": "source 'rsna-pet' is unknown; choose one of rsna-ich, rsna-pe",
        "folder SCANS -o OUT": "needs --table FILE",
    },
    "split INDEX -o OUT": {
        "--proportions 4-1-1": "--proportions 4-1-1: write whole numbers, as in 4:1:1",
    },
    "describe": {"SCANS": "is not there; run nguide index first"},
    "phantom": {
        "rsna-xy OUT": "layout 'rsna-xy' is unknown",
        "folder OUT --oddities tilt,tilt": "--oddities tilt,tilt: 'tilt' is empty or given twice",
    },
    "encode INDEX --device cpu -o OUT": {
        "--dtype int8": "--dtype 'int8' is unknown; choose one of float16, float32",
        "--normalize 40": "--normalize 40: give MEAN,SD for each of the 1 window(s)",
        "--normalize a,b,c,d --window head,lung": "--normalize a,b,c,d: give MEAN,SD for each of the 2 window(s)",
        "--window brain": "window 'brain' is unknown",
        **{
            f"--field {side}": f"field {side} is not a size; give millimetres above 0, for instance 70"
            for side in ("0", "-5", "nan", "inf")
        },
        "--window percentile --normalize 1100,820": "does not fit the window percentile:1-99, which leaves values fr",
        "--window head --window lung --window=adc": "--window is given 3 times (head, lung, adc), and only the last c",
        "--repair --no-repair": "--repair is given 2 times (True, False), and only the last counts; give",
    },
    "store": {
        "show INDEX": "is an index, not a feature store; encode its scans: nguide encode INDEX -o",
        "import nowhere -f npz -o OUT": "does not exist",
    },
    "predict": {
        "nowhere -m RUN -o OUT": "nowhere is not there",
        "SCANS -m STORE -o OUT": "STORE is a feature store, not a model; give the folder of a run",
        "SCANS -m INDEX -o OUT": "index is an index of scans, not a model; give the folder of a run",
        "SCANS -m RUN -o SCANS": "exists and is not empty",
        "SCANS -m RUN -o OUT --share 2": "share is 2.0; give a number above 0",
        "SCANS -m RUN -o OUT --anonymize --store https://pacs/web": "--store puts results into the patient's study",
        "SCANS -m RUN -o OUT --store https://pacs/web/studies/1.2": "names a study",
        "STORE -m RUN -o OUT": "holds features, but the model takes scans: it was trained on features of the encoder",
    },
    "bundle": {"STORE -o OUT": "STORE is a feature store, not a model"},
    "trust": {
        "STORE -o OUT": "STORE is a feature store, not a model",
        "RUN -o OUT --by heads": "--by 'heads' is unknown; choose one of slices, attention",
        "SCANS -o OUT": "is not a complete run",
    },
    "view": {
        "nowhere": "nowhere is not a folder; give what nguide fit",
        "SCANS": "holds neither predictions.parquet",
    },
    "node OUT -m RUN": {
        "--watch nowhere": "--watch nowhere is not a folder; make it first",
        "--from CT": "'CT' is not AET@HOST",
        "--from CT@127.0.0.1 --to PACS@127.0.0.1": "--to 'PACS@127.0.0.1' is not AET@HOST:PORT",
        "--from CT@127.0.0.1 --take colour=red": "there is no condition 'colour'",
        "--from CT@127.0.0.1 --tls-cert cert.pem": "TLS needs all of --tls-cert, --tls-key and --tls-ca; give the miss",
        "--tls-cert SCANS/labels.csv --tls-key SCANS/labels.csv --tls-ca SCANS/labels.csv": "PEM files that belong tog",
        "--from CT@127.0.0.1 --status 8112": "'8112' is not HOST:PORT",
        "--from CT@127.0.0.1 --aet 'A TITLE THAT IS TOO LONG'": "is not an AE title",
        "--pull pacs": "pacs is not the address of a DICOMweb server",
        "--pull https://pacs/web/studies/1.2": "names a study",
    },
}
"""Words of a command -> further words -> the message."""


@pytest.mark.parametrize(
    ("command", "words", "message"),
    [(command, words, message) for command, table in REFUSED.items() for words, message in table.items()],
    ids=lambda value: value[:60],
)
def test_a_mistake_is_one_line_and_nothing_is_written(trained, tmp_path, command, words, message, unchecked):
    places = {"STORE": trained.store.folder, "RUN": trained.run, "OUT": tmp_path / "out"}
    places |= {"INDEX": trained.folder / "index", "SCANS": trained.folder / "scans"}
    line = f"{command} {words}"
    for name, place in places.items():
        line, message = line.replace(name, str(place)), message.replace(name, str(place))
    assert message in refusal(*shlex.split(line))
    assert list(tmp_path.iterdir()) == []


MISUSED = {
    "sweep STORE": "--out",
    "sweep STORE --parts split.csv": "--parts",
    "sweep STORE -o OUT --modes 0": "--modes",
    "sweep STORE -o OUT --warmup -1": "--warmup",
    "experiment": "STORE",
    "experiment STORE": "--out",
    "reproduce semi-synthetic": "--out",
    "index rsna-pe SCANS": "--out",
    "index rsna-pe SCANS -o OUT --workers -1": "--workers",
    "predict SCANS -m RUN": "Missing option",
    "view": "Missing argument",
    "view . --port 70000": "65535",
}
"""What typer refuses, with its own words."""


@pytest.mark.parametrize("line", MISUSED)
def test_a_word_that_is_missing_or_out_of_range_is_named(line):
    assert MISUSED[line] in output_of(*line.split(), code=2)


def test_options_that_have_gone_or_are_hidden_are_not_in_the_help():
    assert "--parts" not in output_of("sweep", "--help")
    printed = nguide("experiment", "--help", env={"COLUMNS": "160"}).output
    assert "--split " in printed
    assert "--splits" not in printed


def test_a_gpu_must_be_there_and_precision_follows_the_device(monkeypatch):
    assert choose_execution("cpu", "auto", 4) == Execution("cpu", "float32", chunk=4)
    with pytest.raises(UserError, match="is for CUDA"):
        choose_execution("cpu", "tf32")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert choose_execution(None, "auto") == Execution("cuda", "tf32")
    assert choose_execution("cuda:1", "bf16") == Execution("cuda:1", "bf16")
    with pytest.raises(UserError, match="--device cuda:2: this machine or torch has none; use cuda:0 to cuda:1"):
        choose_execution("cuda:2", "auto")
