"""Every method on three programs, as a user would run them."""

import json

from pellucid.bench.methods import find_methods
from pellucid.cli import main


def test_every_method_runs_on_three_programs(tmp_path, capsys):
    main(
        [
            "bench",
            "--programs",
            "copy",
            "hist",
            "shift",
            "--tiers",
            "raw",
            "--pairs",
            "16",
            "--out",
            str(tmp_path),
        ]
    )
    cells = json.loads((tmp_path / "results.json").read_text())["cells"]
    assert {c["method"] for c in cells} == set(find_methods())
    assert not [c["failed"] for c in cells if c["failed"]]
    ranked = {(c["method"], c["program"]): c["metrics"] for c in cells if c["universe"] == "edge"}
    for method in ("patch-edges", "eap-ig-inputs", "acdc", "edge-masks"):
        assert ranked[method, "hist"]["auroc_E"] == 1
    assert ranked["eap", "hist"]["recall_1pc"] < 0.5  # its known blind spot
    assert ranked["random", "hist"]["ap_E"] < 1
    assert "raw: edges" in capsys.readouterr().out
    assert "patch-edges" in (tmp_path / "leaderboard.md").read_text()
    assert "patch-edges" in (tmp_path / "leaderboard.html").read_text()
