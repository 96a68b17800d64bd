"""A draft into OpenVINO's format, told which layers feed it: `openvino_export.py IDS OUT OPTIMUM-CLI ARGUMENTS...`.

OpenVINO GenAI 2026.4 takes the outputs of layers 2, n//2 and n-3 unless the draft's IR names others in its rt_info,
which optimum 2.2 never writes; ids in config.json are not read (openvino.genai's eagle3_model_transforms.cpp). An id is
that of the layer whose output is taken, so boundary less one. Standard library only.
"""

import subprocess
import sys
from pathlib import Path

MODE = '<eagle3_mode value="True" />'


def tell(xml: Path, ids: str) -> None:
    """Write `ids` beside the mark of an EAGLE-3 draft. Raises ValueError where there is no such mark."""
    text = xml.read_text()
    if text.count(MODE) != 1:
        raise ValueError(f"{xml} is not marked as an EAGLE-3 draft: {MODE}")
    xml.write_text(text.replace(MODE, f'{MODE}<hidden_layers_list value="{ids}" />'))


def main() -> None:
    ids, out, *command = sys.argv[1:]
    if done := subprocess.run([*command, out], check=False).returncode:
        sys.exit(done)
    tell(Path(out) / "openvino_model.xml", ids.replace(",", " "))


if __name__ == "__main__":
    main()
