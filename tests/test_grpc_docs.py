"""docs/grpc-api.md against the .proto files: every method has a section, every field is told."""

import re

from google.protobuf import descriptor_pb2

from doc_pages import PAGES, literals, page
from headwater.serve.grpc.messages import FOLDER

FILES = descriptor_pb2.FileDescriptorSet.FromString((FOLDER / "protos.bin").read_bytes()).file
HERE = {"sochdb.proto", "pull.proto"}  # others have pages of their own


def fields(kind: descriptor_pb2.DescriptorProto) -> set[str]:
    return {field.name for field in kind.field}.union(*map(fields, kind.nested_type))


def test_every_method_has_a_section() -> None:
    titles = "\n".join(title for path in PAGES for title in re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE))
    for file in FILES:
        for service in file.service:
            for method in service.method:
                assert re.search(rf"\b{method.name}\b", titles), f"{service.name}/{method.name}"


def test_every_field_is_told() -> None:
    told = set(literals(page("docs/grpc-api.md")))
    for file in FILES:
        if file.name in HERE:
            wanted = set().union(*map(fields, file.message_type))
            assert wanted - told == set(), file.name


def test_every_service_is_named() -> None:
    text = "\n".join(path.read_text() for path in PAGES)
    for file in FILES:
        for service in file.service:
            assert f"{file.package}.{service.name}" in text
