"""A question in the style of ScienceQA with everything its tools answer. Written for this project; no dataset text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class DemoQuestion:
    """A question, its options, and what each tool says about it, whatever it is asked."""

    question: str
    options: str
    answer: str
    tools: Mapping[str, str]


QUESTION = DemoQuestion(
    question="Which of these rocks forms when melted rock cools and hardens?",
    options="(A) limestone (B) granite (C) marble (D) sandstone",
    answer="B",
    tools={
        "Image2Text": (
            "Image caption: A diagram of the rock cycle with arrows between magma, sediment and three kinds of rock. "
            "OCR result: melting, cooling, pressure, heat, erosion, limestone, granite, marble, sandstone"
        ),
        "Search": (
            "Igneous rock forms when magma or lava cools and becomes solid. Magma that cools slowly below the surface "
            "grows large crystals, and the usual result is granite. Lava that cools quickly above ground gives basalt. "
            "Sandstone and limestone are sedimentary: grains or shells are pressed together in layers. Marble is "
            "limestone that heat and pressure have changed."
        ),
        "Retrieve": (
            "Granite is a coarse-grained igneous rock made mostly of quartz and feldspar. It forms from magma that "
            "cools slowly and hardens deep under the ground, and reaches the surface when the rock above is worn away."
        ),
    },
)
