"""Sends what schemathesis makes of our OpenAPI document; driven by `service_abuse.py`, in its own environment.

Half of the requests follow the document, half break it, and in half of either the ids are those of objects that exist,
so that requests get past the first check. Prints one JSON line: how many were sent, what they answered, what is wrong.
"""

import argparse
import collections
import json
import random
import sys
import time
import warnings

import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis import GenerationMode

TIMEOUT_S = 120.0
MAX_PROBLEMS = 30


class Fuzzer:
    """Sends cases and looks at the answers."""

    def __init__(self, options):
        self.options = options
        self.session = requests.Session()
        self.random = random.Random(options.seed)
        self.live = json.loads(options.live)
        self.num_sent = 0
        self.statuses = collections.Counter()
        self.operations = collections.Counter()
        self.problems = []
        self.slowest_s = 0.0

    def send(self, case, label):
        if self.random.random() < 0.5 and not label.startswith("DELETE") and "finish" not in label:
            case.path_parameters = self.with_live_ids(case.path_parameters)
            case.body = self.with_live_ids(case.body)
        if label.endswith("/retrieve_futures") and isinstance(case.body, dict):
            case.body["timeout"] = 0.05  # it would be held for what is never finished
        started = time.monotonic()
        try:
            response = case.call(
                base_url=self.options.url, session=self.session, timeout=TIMEOUT_S, allow_redirects=False
            )
        except (UnicodeError, requests.exceptions.InvalidHeader, requests.exceptions.InvalidURL):
            return  # it cannot be said in HTTP, so it was not sent
        except requests.exceptions.RequestException as error:
            self.problems.append(f"{label}: {type(error).__name__}: {error}")
            self.num_sent += 1
            return
        self.num_sent += 1
        self.slowest_s = max(self.slowest_s, time.monotonic() - started)
        self.statuses[response.status_code] += 1
        self.operations[label] += 1
        text = response.text
        for known in self.live["told"]:
            text = text.replace(known, "")
        if response.status_code >= 500:
            self.problems.append(f"{label}: {response.status_code} {text[:300]} after {case.as_curl_command()[:600]}")
        for word in self.live["forbidden"]:
            if word in text:
                self.problems.append(f"{label}: the answer holds {word!r}: {text[:300]}")

    def with_live_ids(self, values):
        if isinstance(values, dict):
            return {key: self.live["ids"].get(key, self.with_live_ids(value)) for key, value in values.items()}
        return values


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", required=True)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--live", required=True, help="JSON: ids, forbidden words, words that are told on purpose")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    fuzzer = Fuzzer(options)
    schema = schemathesis.openapi.from_url(f"{options.url}/openapi.json")
    operations = [result.ok() for result in schema.get_all_operations()]
    number = options.seed
    while fuzzer.num_sent < options.requests and len(fuzzer.problems) < MAX_PROBLEMS:
        share = max(1, (options.requests - fuzzer.num_sent) // (2 * len(operations)))
        for operation in operations:
            for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
                label = f"{operation.method.upper()} {operation.path}"
                fuzz(fuzzer, operation.as_strategy(mode), label, share, number)
        number += 1
    report = {
        "operations": len(operations),
        "operations_reached": len(fuzzer.operations),
        "requests": fuzzer.num_sent,
        "statuses": dict(fuzzer.statuses),
        "slowest_s": fuzzer.slowest_s,
        "problems": fuzzer.problems[:MAX_PROBLEMS],
    }
    print(json.dumps(report), flush=True)


def fuzz(fuzzer, strategy, label, count, number):
    @seed(number)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=strategy)
    def run(case):
        fuzzer.send(case, label)

    try:
        run()
    except Exception as error:  # noqa: BLE001 - an operation that cannot be broken, such as one without parameters
        print(f"{label}: {type(error).__name__}: {error}", file=sys.stderr)


if __name__ == "__main__":
    main()
