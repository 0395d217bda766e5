"""docs/grpc-api.md against the .proto files: every method has a section, every field is told."""

import re

import pytest
from google.protobuf import descriptor_pb2
from tests.doc_pages import ROOT, literals, page

from headwater.serve.grpc.messages import FOLDER

FILES = descriptor_pb2.FileDescriptorSet.FromString((FOLDER / "protos.bin").read_bytes()).file
PAGE = {"sochdb.proto": "docs/grpc-api.md", "pull.proto": "docs/grpc-api.md", "changefeed.proto": "docs/changefeed.md"}


def fields(kind: descriptor_pb2.DescriptorProto) -> set[str]:
    return {field.name for field in kind.field}.union(*map(fields, kind.nested_type))


def test_every_proto_file_has_a_documentation_page() -> None:
    assert {file.name for file in FILES} == PAGE.keys()


WRITTEN = [file for file in FILES if (ROOT / PAGE.get(file.name, "")).is_file()]


@pytest.mark.parametrize("file", WRITTEN, ids=lambda file: file.name)
def test_grpc_page_documents_every_service_method_and_field(file: descriptor_pb2.FileDescriptorProto) -> None:
    text = page(PAGE[file.name])
    titles = "\n".join(re.findall(r"^#+ (.+)$", text, re.MULTILINE))
    for service in file.service:
        assert f"{file.package}.{service.name}" in text
        for method in service.method:
            assert re.search(rf"\b{method.name}\b", titles if len(service.method) > 1 else text), method.name
    if PAGE[file.name] == "docs/grpc-api.md":  # others tell of their fields by examples
        wanted = set().union(*map(fields, file.message_type))
        assert wanted - {*literals(text)} == set()
