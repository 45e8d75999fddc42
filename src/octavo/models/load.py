"""Opens a model: reads everything about it but its weights. Standard library only, a few milliseconds.

model = open_model(Path("SmolLM2-135M-Instruct.gguf"))
model.spec         sizes, KV groups, number of parameters       (the planner stops here)
model.program      ops for a runner
model.tensors      where each weight lies; `weights.WeightSource` reads them
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from octavo.errors import MachineError, ModelFileError, ModelNotFoundError, UnsupportedModelError
from octavo.models.config import spec_from_hf, with_eos
from octavo.models.decoder import emit_decoder
from octavo.models.fields import Fields
from octavo.models.generation_config import GenerationDefaults, generation_from_gguf, generation_from_hf
from octavo.models.gguf_config import spec_from_gguf
from octavo.models.gguf_file import Metadata, read_gguf_header
from octavo.models.json_file import read_json
from octavo.models.program import Program
from octavo.models.safetensors_file import read_safetensors_directory
from octavo.models.spec import ModelSpec
from octavo.models.tensor_directory import match_gguf_tensors, match_hf_tensors
from octavo.models.tensor_entry import TensorEntry

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedModel:
    """A model without its weights.

    Args:
        path: The folder or `.gguf` file that was opened.
        tensors: By our names (`names.py`).
        spare_head: The head, where the file of a tied model holds it besides the embedding; the loader compares them.
        tokenizer_folder: Folder with `tokenizer.json` and friends; `None` for GGUF.
        gguf_metadata: Metadata of a GGUF file, with the tokenizer in it; empty for a folder.
        generation: Suggested sampling.
    """

    path: Path
    format: Literal["safetensors", "gguf"]
    spec: ModelSpec
    program: Program
    tensors: Mapping[str, TensorEntry] = field(hash=False)
    spare_head: TensorEntry | None
    tokenizer_folder: Path | None
    gguf_metadata: Metadata = field(hash=False)
    generation: GenerationDefaults

    @property
    def weight_bytes(self) -> int:
        """Bytes of all tensors as stored."""
        return sum(entry.num_bytes for entry in self.tensors.values())


def open_model(path: Path) -> OpenedModel:
    """Open a Hugging Face folder, a `.gguf` file, or a folder that holds one `.gguf` file.

    Raises:
        ModelNotFoundError: nothing is there.
        UnsupportedModelError: an architecture, format or feature we do not run.
        ModelFileError: a file is truncated, contradicts itself, or lacks a field or tensor.
        MachineError: a file may not be read.
    """
    try:
        return _open(path)
    except OSError as error:  # the system's word on the path itself; reading has its own errors
        raise MachineError(f"{path}: cannot be opened: {error.strerror}") from error


def read_spec(path: Path) -> ModelSpec:
    """Read the sizes only: of a model, or of a lone `config.json` whose weights are elsewhere.

    Raises:
        As `open_model`.
    """
    if path.name.endswith(".json"):
        return spec_from_hf(read_json(path), where=str(path), name=path.parent.name or path.stem)
    if path.is_dir() and (path / "config.json").exists():
        return _folder_spec(path)
    return open_model(path).spec


def _open(path: Path) -> OpenedModel:
    if path.is_file():
        return _open_gguf(path)
    if not path.is_dir():
        if path.exists():
            raise ModelFileError(f"{path}: is a device or a pipe, a file or folder was expected")
        raise ModelNotFoundError(f"{path}: no such file or folder")
    if (path / "config.json").exists():
        return _open_folder(path)
    files = sorted(path.glob("*.gguf"))
    if len(files) == 1:
        return _open_gguf(files[0])
    if files:
        raise ModelFileError(
            f"{path}: holds {len(files)} GGUF files", hints=(f"name one of them, for example `{files[0]}`",)
        )
    raise ModelFileError(f"{path}: holds neither config.json nor a .gguf file")


def _open_gguf(path: Path) -> OpenedModel:
    header = read_gguf_header(path)
    spec = spec_from_gguf(header)
    return OpenedModel(
        path=path,
        format="gguf",
        spec=spec,
        program=emit_decoder(spec),
        tensors=match_gguf_tensors(spec, header.tensors, path),
        spare_head=None,
        tokenizer_folder=None,
        gguf_metadata=header.metadata,
        generation=generation_from_gguf(header.metadata, str(path)),
    )


def _open_folder(folder: Path) -> OpenedModel:
    spec = _folder_spec(folder)
    generation_path = folder / "generation_config.json"
    generation = read_json(generation_path) if generation_path.exists() else {}
    tensors, spare_head = match_hf_tensors(spec, _read_shards(folder), folder)
    return OpenedModel(
        path=folder,
        format="safetensors",
        spec=spec,
        program=emit_decoder(spec),
        tensors=tensors,
        spare_head=spare_head,
        tokenizer_folder=folder,
        gguf_metadata={},
        generation=generation_from_hf(generation, str(generation_path)),
    )


def _folder_spec(folder: Path) -> ModelSpec:
    """Read the configuration, and the end-of-sequence ids that the files beside it name."""
    config_path = folder / "config.json"
    spec = spec_from_hf(read_json(config_path), where=str(config_path), name=folder.resolve().name)
    generation_path = folder / "generation_config.json"
    if generation_path.exists():
        fields = Fields(read_json(generation_path), str(generation_path))
        spec = with_eos(spec, *fields.token_ids("eos_token_id", spec.vocab_size))
        if spec.bos_token_id is None:
            spec = replace(spec, bos_token_id=next(iter(fields.token_ids("bos_token_id", spec.vocab_size)), None))
    return with_eos(spec, *_tokenizer_eos(folder, spec.vocab_size))


def _tokenizer_eos(folder: Path, vocab_size: int) -> tuple[int, ...]:
    """Return the id of the token that `tokenizer_config.json` calls the end; empty where it names none."""
    config_path, tokenizer_path = folder / "tokenizer_config.json", folder / "tokenizer.json"
    if not config_path.exists():
        return ()
    config = read_json(config_path)
    token = config.get("eos_token")
    content = token.get("content") if isinstance(token, dict) else token
    if not isinstance(content, str):
        return ()
    listed = config.get("added_tokens_decoder")
    added = [(_as_id(key), entry) for key, entry in listed.items()] if isinstance(listed, dict) else []
    if not added and tokenizer_path.exists():
        entries = read_json(tokenizer_path).get("added_tokens")
        added = [(entry.get("id"), entry) for entry in _objects(entries)]
    ids = [token_id for token_id, entry in added if isinstance(entry, dict) and entry.get("content") == content]
    return Fields({"eos_token": ids}, str(config_path)).token_ids("eos_token", vocab_size)


def _as_id(key: str) -> object:
    return int(key) if key.isdecimal() and len(key) < 12 else key


def _objects(value: object) -> list[dict[str, object]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _read_shards(folder: Path) -> dict[str, TensorEntry]:
    """Read the tables of all safetensors files of a model."""
    if (folder / _INDEX).exists():
        return _read_indexed(folder, read_json(folder / _INDEX).get("weight_map"))
    if (folder / _SINGLE).exists():
        return read_safetensors_directory(folder / _SINGLE)
    files = sorted(folder.glob("*.safetensors"))
    if len(files) == 1:
        return read_safetensors_directory(files[0])
    if files:
        raise ModelFileError(f"{folder}: {len(files)} safetensors files, but no {_INDEX} that says what is where")
    if any(folder.glob("*.bin")) or any(folder.glob("*.pth")) or any(folder.glob("*.pt")):
        raise UnsupportedModelError(
            f"{folder}: holds pickled weights only; safetensors and GGUF files can be read",
            because="unpickling runs whatever code the file contains",
        )
    raise ModelFileError(f"{folder}: holds no {_SINGLE}")


def _read_indexed(folder: Path, weight_map: object) -> dict[str, TensorEntry]:
    """Read every file that the index names; each tensor must be where the index says, and only there."""
    index = folder / _INDEX
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelFileError(f"{index}: weight_map is not an object of tensor names to file names")
    found: dict[str, TensorEntry] = {}
    for file_name in dict.fromkeys(weight_map.values()) if _are_file_names(weight_map) else ():
        for name, entry in read_safetensors_directory(folder / file_name).items():
            if name in found:
                raise ModelFileError(f"{folder}: tensor {name!r} is in {found[name].path.name} and in {file_name}")
            found[name] = entry
    if not _are_file_names(weight_map):
        raise ModelFileError(f"{index}: weight_map names something that is not a file of this folder")
    for name, file_name in weight_map.items():
        if name not in found or found[name].path.name != file_name:
            raise ModelFileError(
                f"{folder / file_name}: tensor {name!r} is missing", because=f"{_INDEX} places it there"
            )
    return found


def _are_file_names(weight_map: dict[str, object]) -> bool:
    """Tell whether all values are plain file names: an index must not lead outside its folder."""
    return all(isinstance(name, str) and name and Path(name).name == name for name in weight_map.values())
