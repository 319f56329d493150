"""A collector of OpenTelemetry traces: takes OTLP over HTTP and prints each message as a line of JSON, read by the
protocol's own package.

    python otlp_collector.py [--refuse COUNT]

The first line is its address. With --refuse the first messages are answered with 503. It ends with its standard input.
"""

import argparse
import base64
import json
import os
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from google.protobuf.json_format import MessageToDict
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest, ExportTraceServiceResponse


def value(any_value: dict):
    (kind, content), = any_value.items()
    match kind:
        case "intValue":
            return int(content)
        case "arrayValue":
            return [value(item) for item in content["values"]]
    return content


def attributes(pairs: list) -> dict:
    read = {pair["key"]: value(pair["value"]) for pair in pairs}
    assert len(read) == len(pairs), f"an attribute comes twice in {pairs}"
    return read


def readable(message: ExportTraceServiceRequest) -> dict:
    """Numbers as numbers, ids in hexadecimal, attributes as objects."""
    message = MessageToDict(message)
    for group in message["resourceSpans"]:
        group["resource"] = attributes(group["resource"]["attributes"])
        for scope in group["scopeSpans"]:
            for span in scope["spans"]:
                for key in ("traceId", "spanId", "parentSpanId"):
                    span[key] = base64.b64decode(span.get(key, "")).hex()
                for key in ("startTimeUnixNano", "endTimeUnixNano"):
                    span[key] = int(span[key])
                span["attributes"] = attributes(span["attributes"])
                for event in span.get("events", []):
                    event["timeUnixNano"] = int(event["timeUnixNano"])
                    event["attributes"] = attributes(event["attributes"])
    return message


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    refuse = 0

    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"]))
        if Handler.refuse > 0:
            Handler.refuse -= 1
            self.answer(503, b"")
            return
        message = ExportTraceServiceRequest.FromString(body)
        message.DiscardUnknownFields()
        assert message.SerializeToString(deterministic=True) and len(message.SerializeToString()) == len(body), "unknown fields"
        told = {"path": self.path, "headers": {name.lower(): text for name, text in self.headers.items()}, "message": readable(message)}
        print(json.dumps(told), flush=True)
        self.answer(200, ExportTraceServiceResponse().SerializeToString())

    def answer(self, status: int, body: bytes):
        self.send_response(status)
        self.send_header("content-type", "application/x-protobuf")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


def main():
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--refuse", type=int, default=0)
    Handler.refuse = arguments.parse_args().refuse
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print("%s:%d" % server.server_address, flush=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    main()
