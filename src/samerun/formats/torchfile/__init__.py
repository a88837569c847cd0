"""torch.save files and bare pickles, read without torch and without executing anything they name."""

from samerun.formats.torchfile.archive import Archive, Record, read_archive, read_payload, read_value
from samerun.formats.torchfile.scan import scan_pickle
from samerun.formats.torchfile.unpickle import Decoded, decode_pickle
from samerun.formats.torchfile.values import Inert, TensorRef

__all__ = [
    "Archive",
    "Decoded",
    "Inert",
    "Record",
    "TensorRef",
    "decode_pickle",
    "read_archive",
    "read_payload",
    "read_value",
    "scan_pickle",
]
