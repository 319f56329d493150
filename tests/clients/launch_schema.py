"""Launch files against their JSON Schema, by jsonschema: SCHEMA FILES, both JSON. FILES is a list of instances; prints a JSON list of
what is wrong with each, null where nothing is."""

import json
import sys

from jsonschema import Draft202012Validator

schema, files = (json.load(open(name, encoding="utf-8")) for name in sys.argv[1:3])
Draft202012Validator.check_schema(schema)
validator = Draft202012Validator(schema)


def fault(instance):
    error = next(validator.iter_errors(instance), None)
    return None if error is None else f"{error.json_path}: {error.message}"


print(json.dumps([fault(instance) for instance in files]))
