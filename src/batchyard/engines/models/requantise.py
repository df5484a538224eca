"""Floor 3. Storing a model's weights in another form: some forms have faster kernels than others.

Metadata and everything that is not a large matrix pass through unchanged.
"""

from __future__ import annotations

from pathlib import Path

from batchyard.engines.models.cache import new_file
from batchyard.engines.models.gguf_file import check_gguf
from batchyard.errors import ModelError

#: Forms that the gguf package can write.
KINDS = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "F16", "F32")


def requantise(source: Path, target: Path, kind: str) -> None:
    """Write *source* to *target* with every weight matrix stored as *kind*.

    Raises:
        ModelError: the kind is unknown, the file is damaged, or holds a form that cannot be read.
    """
    if kind not in KINDS:
        raise ModelError(f"There is no form {kind!r}. The forms are: {', '.join(KINDS)}.")
    check_gguf(source)
    import gguf  # noqa: PLC0415 - brings numpy along
    from gguf.quants import dequantize, quantize  # noqa: PLC0415

    reader = gguf.GGUFReader(source)

    form = gguf.GGMLQuantizationType[kind]
    writer = gguf.GGUFWriter(None, reader.get_field("general.architecture").contents())
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in {"general.architecture", "general.file_type"}:
            continue
        element = field.types[-1] if field.types[0] is gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), field.types[0], element)
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{kind}" if kind != "F32" else "ALL_F32"])
    plain = {gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16}
    for tensor in reader.tensors:
        if len(tensor.shape) < 2 or tensor.tensor_type == form:
            data, stored = tensor.data, tensor.tensor_type
        else:
            try:
                weights = dequantize(tensor.data, tensor.tensor_type)
                data, stored = quantize(weights, form), form
            except (NotImplementedError, gguf.QuantError) as error:
                raise ModelError(
                    f"{source.name} stores {tensor.name} as {tensor.tensor_type.name}, "
                    f"which cannot be changed to {kind}: {error}"
                ) from error
        writer.add_tensor(tensor.name, data, raw_dtype=None if stored in plain else stored)
    with new_file(target) as file:
        writer.write_header_to_file(Path(file.name))
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
