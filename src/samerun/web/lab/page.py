"""The lab's page as text: one file that fetches nothing, with its style, script and test vectors inside."""

from __future__ import annotations

from typing import Any

import jinja2
from markupsafe import Markup

from samerun import __version__
from samerun.catalog import load_catalog
from samerun.core import lab
from samerun.report.html import embed, prose
from samerun.report.style import base_style, read_static, script_hash
from samerun.web.lab.experiments import EXPERIMENTS, RATE_CODES

_PACKAGE = "samerun.web.lab"


def render_lab() -> str:
    """Returns the page; the same text for every caller of this version of samerun."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader(_PACKAGE, "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["prose"] = prose
    script = read_static(_PACKAGE, "rules.js") + read_static(_PACKAGE, "lab.js")
    return environment.get_template("lab.html").render(
        version=__version__,
        style=Markup(base_style() + read_static(_PACKAGE, "lab.css")),
        script=Markup(script),
        script_hash=script_hash(script),
        data=embed(page_data()),
        experiments=EXPERIMENTS,
        rate_findings=[load_catalog()[code] for code in RATE_CODES],
        checkpoint=lab.CHECKPOINT_UPDATES,
    )


def page_data() -> dict[str, Any]:
    """Returns the constants of the definition, and runs that the page must compute bit for bit."""
    return {
        "momentum": lab.MOMENTUM,
        "beta1": lab.BETA1,
        "beta2": lab.BETA2,
        "epsilon": lab.EPSILON,
        "horizon": lab.HORIZON_UPDATES,
        "samples": list(lab.SAMPLES),
        "checkpoint": lab.CHECKPOINT_UPDATES,
        "hidden": {rule.value: list(parts) for rule, parts in lab.HIDDEN.items()},
        "vectors": lab.lab_vectors(),
    }
