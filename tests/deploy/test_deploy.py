"""What `deploy/` holds loads where it is meant to be loaded, and names nothing that is not there."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway import ending
from gateway.metrics import names
from policies import configuration
from policies.settings import Server
from worker.native.build import COMPILER

DEPLOY = Path(__file__).parents[2] / "deploy"
DASHBOARDS = sorted((DEPLOY / "grafana").glob("*.json"))
RULES = [DEPLOY / "prometheus" / "rules.yml", DEPLOY / "prometheus" / "alerts.yml"]
CHART = DEPLOY / "helm" / "penstock"
SERIES = {
    metric.name + suffix
    for metric in names.reference()
    for suffix in (("_bucket", "_sum", "_count") if metric.kind == "histogram" else ("",))
}


def promtool(*arguments: str, where: Path = DEPLOY / "prometheus") -> None:
    found = shutil.which("promtool")
    assert found, "promtool is in Debian's package prometheus"
    ran = subprocess.run([found, *arguments], cwd=where, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_rules_alerts_and_configurations_are_sound():
    promtool("check", "rules", "rules.yml", "alerts.yml")
    promtool("check", "config", "--syntax-only", "prometheus.yml")
    promtool("check", "config", "--syntax-only", "prometheus.yml", where=DEPLOY / "compose")


def test_alerts_ring_when_they_should_and_only_then():
    promtool("test", "rules", "tests.yml")


def test_the_page_on_observing_has_every_alert_and_no_other():
    page = (DEPLOY.parent / "docs" / "how-to" / "observing.md").read_text()
    (table,) = re.findall(r"^## When an alert rings\n(.*?)^## ", page, re.M | re.S)
    groups = yaml.safe_load(RULES[1].read_text())["groups"]
    alerts = [rule["alert"] for group in groups for rule in group["rules"]]
    assert re.findall(r"`(Penstock\w+)`", table) == alerts


def expressions() -> Iterator[tuple[str, str]]:
    """Every query, with where it stands."""
    for path in RULES:
        for group in yaml.safe_load(path.read_text())["groups"]:
            yield from ((rule.get("alert") or rule["record"], rule["expr"]) for rule in group["rules"])
    for path in DASHBOARDS:
        for panel in json.loads(path.read_text())["panels"]:
            yield from ((panel["title"], target["expr"]) for target in panel.get("targets", ()))


@pytest.mark.parametrize(("title", "expression"), list(expressions()))
def test_queries_name_metrics_and_labels_that_there_are(title, expression):
    recorded = {rule["record"] for group in yaml.safe_load(RULES[0].read_text())["groups"] for rule in group["rules"]}
    without_strings = re.sub(r'"[^"]*"', '""', expression)
    named = set(re.findall(r"(?<![\w:])(?:penstock|vllm|gen_ai_(?:server|client))[_:][\w:]*", without_strings))
    assert named - recorded <= SERIES, title
    assert named or re.match(r"up\b", expression), title
    for name, selector in re.findall(r"([a-z_:]\w*(?::\w+)*)\{([^}]*)\}", expression):
        family = next(
            (each for each in names.reference() if re.fullmatch(each.name + "(_bucket|_sum|_count)?", name)), None
        )
        if family is not None:
            labels = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", re.sub(r'"[^"]*"', '""', selector)))
            assert labels <= {*family.labels, "le", "instance"}, (title, name)


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.name)
def test_a_dashboard_is_one_that_grafana_loads(path):
    dashboard = json.loads(path.read_text())
    assert dashboard["uid"]
    assert dashboard["schemaVersion"] >= 39
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len(set(ids))
    variables = {variable["name"] for variable in dashboard["templating"]["list"]}
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        for target in panel.get("targets", ()):
            used = set(re.findall(r"\$(?:\{(\w+)\}|(\w+))", target["expr"]))
            assert {one or other for one, other in used} <= {*variables, "__rate_interval"}, panel["title"]
    asked = re.search(r"label_values\((\w+), (\w+)\)", json.dumps(dashboard["templating"]))
    assert asked
    assert asked[2] in names.METRICS[asked[1]].labels


def test_the_unit_is_sound(tmp_path):
    unit = (DEPLOY / "systemd" / "penstock.service").read_text()
    assert re.search(
        r"^ExecStart=/opt/penstock/bin/penstock serve --config \S+ --data-dir /var/lib/penstock$", unit, re.M
    )
    assert "StateDirectory=penstock" in unit
    (grace_s,) = re.findall(r"^TimeoutStopSec=(\d+)$", unit, re.M)
    assert float(grace_s) > Server().drain_s + ending.CLOSING_S
    # What the engine compiles is kept beneath these: nothing else can be written to.
    assert "CacheDirectory=penstock" in unit
    for name in ("HOME", "XDG_CACHE_HOME"):
        assert re.search(rf"^Environment=.*\b{name}=/var/cache/penstock\b", unit, re.M), name
    analyze = shutil.which("systemd-analyze")
    if analyze is not None:
        place = tmp_path / "penstock.service"  # the same with a program that there is on this machine
        place.write_text(unit.replace("/opt/penstock/bin/penstock", shutil.which("true") or "/bin/true"))
        ran = subprocess.run([analyze, "verify", place], capture_output=True, text=True)
        assert (ran.returncode, ran.stderr) == (0, "")


def test_the_image_has_the_compiler_that_kernels_are_built_by():
    assert COMPILER in packages_of_the_image()


def test_the_first_process_of_a_container_buries_those_whose_parent_is_gone():
    (said,) = re.findall(r"^ENTRYPOINT (\[.*\])$", (DEPLOY / "Dockerfile").read_text(), re.M)
    first, *started = json.loads(said)
    assert (first, started) == ("tini", ["--", "penstock"])
    assert first in packages_of_the_image()


def packages_of_the_image() -> list[str]:
    packages = re.search(r"apt-get install \S+ \S+ (.*?) &&", (DEPLOY / "Dockerfile").read_text())
    assert packages
    return packages[1].split()


def test_the_image_has_what_the_page_on_running_has_one_install():
    page = (DEPLOY.parent / "docs" / "how-to" / "running.md").read_text()
    (on_the_page,) = set(re.findall(r"pip install (?:--upgrade )?'\S+clone\[(\S+)\]'", page))
    (in_the_image,) = re.findall(r"pip install \S+ '/src\[(\S+)\]'", (DEPLOY / "Dockerfile").read_text())
    assert in_the_image == on_the_page


def test_the_image_is_given_what_the_package_is_built_from_and_nothing_else_of_a_clone():
    """A layer keeps what was copied, though a later one deletes it: what a trial leaves in a clone are keys, too."""
    root = DEPLOY.parent
    lines = [line for line in (root / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    assert lines[0] == "*"
    built = tomllib.loads((root / "pyproject.toml").read_text())
    packages = {each.removesuffix("*") for each in built["tool"]["setuptools"]["packages"]["find"]["include"]}
    project = built["project"]
    needed = {*packages, "pyproject.toml", project["readme"], *project["license-files"]}
    assert {line[1:] for line in lines if line.startswith("!")} == needed
    assert [name for name in needed if not (root / name).exists()] == []


def test_caches_of_containers_lie_in_the_volume():
    image = (DEPLOY / "Dockerfile").read_text()
    (volume,) = re.findall(r"^VOLUME (\S+)$", image, re.M)
    (cache,) = re.findall(r"^ENV XDG_CACHE_HOME=(\S+)$", image, re.M)
    assert Path(cache).is_relative_to(volume)
    services = yaml.safe_load((DEPLOY / "compose" / "compose.yaml").read_text())["services"]
    assert volume in {each.split(":")[1] for each in services["penstock"]["volumes"]}


def test_the_compose_file_sets_what_there_is_to_set():
    compose = yaml.safe_load((DEPLOY / "compose" / "compose.yaml").read_text())
    services = compose["services"]
    settings = {
        name: re.sub(r"\$\{(\w+)[^}]*\}", "secret", str(value))
        for name, value in services["penstock"]["environment"].items()
        if "__" in name
    }
    # A password may have letters that mean something else in a URL.
    assert [
        name for name, value in services["penstock"]["environment"].items() if "://" in value and "$" in value
    ] == []
    assert services["penstock"]["environment"]["PGPASSWORD"] == services["postgres"]["environment"]["POSTGRES_PASSWORD"]
    config = configuration.load("", settings, {})
    assert (config.server.processes, config.metrics.access) == (2, "open")
    # Answers may finish before a container is killed, by Compose and as the page has one started.
    page = (DEPLOY.parent / "docs" / "how-to" / "running.md").read_text()
    (asked_s,) = re.findall(r"--stop-timeout (\d+)", page)
    for grace_s in (asked_s, services["penstock"]["stop_grace_period"].removesuffix("s")):
        assert float(grace_s) > config.server.drain_s + ending.CLOSING_S
    assert services["penstock"]["shm_size"] == "1gb"
    assert (
        DEPLOY / "compose" / services["penstock"]["build"]["context"] / services["penstock"]["build"]["dockerfile"]
    ).exists()
    for name, service in services.items():
        assert set(service.get("depends_on", ())) <= set(services), name
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            there = (DEPLOY / "compose" / source).exists() if source.startswith(".") else source in compose["volumes"]
            assert there, f"{name}: {volume}"
    for path in ("grafana.yaml", "dashboards.yaml"):
        assert yaml.safe_load((DEPLOY / "compose" / path).read_text())["apiVersion"] == 1


def rendered(path: Path, values: dict[str, Any]) -> list[Any]:
    """As Helm would: the few of its words that the chart uses, and an error for every other one and for a value that
    is not there."""
    chart = {"Name": "penstock"}

    def find(name: str) -> Any:
        found: Any = {"Values": values, "Release": {"Name": "here"}, "Chart": chart}
        for part in name.strip().removeprefix(".").split("."):
            found = found[part]
        return found

    def pipe(expression: str) -> str:
        first, *filters = [part.strip() for part in expression.split("|")]
        value = yaml.safe_dump(find(first[7:])).rstrip() if first.startswith("toYaml ") else find(first)
        for each in filters:
            if each == "sha256sum":
                value = hashlib.sha256(value.encode()).hexdigest()
            else:
                indent = " " * int(re.fullmatch(r"nindent (\d+)", each)[1])
                value = "\n" + "\n".join(indent + line if line else line for line in str(value).splitlines())
        return str(value)

    kept, shown = [], [True]
    for line in path.read_text().splitlines():
        if condition := re.fullmatch(r"\s*\{\{- if (\S+) \}\}", line):
            shown.append(shown[-1] and bool(find(condition[1])))
        elif re.fullmatch(r"\s*\{\{- end \}\}", line):
            shown.pop()
        elif shown[-1]:
            told = re.sub(r"^\s*\{\{-(.*?)\}\}", lambda found: pipe(found[1]), line)
            told = re.sub(r"\{\{(.*?)\}\}", lambda found: pipe(found[1]), told)
            kept.append(told.removeprefix("\n"))
    assert shown == [True]
    return [each for each in yaml.safe_load_all("\n".join(kept)) if each is not None]


@pytest.mark.parametrize("storage_class", ["", "fast"])
@pytest.mark.parametrize("is_monitored", [False, True])
def test_the_chart_renders_to_what_kubernetes_knows(storage_class, is_monitored):
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    values["persistence"]["storageClass"], values["serviceMonitor"]["enabled"] = storage_class, is_monitored
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert (chart["apiVersion"], chart["name"]) == ("v2", CHART.name)
    objects = {each["kind"]: each for path in (CHART / "templates").glob("*.yaml") for each in rendered(path, values)}
    assert ("ServiceMonitor" in objects) == is_monitored
    if is_monitored:
        job = objects["Service"]["metadata"]["labels"][objects["ServiceMonitor"]["spec"]["jobLabel"]]
        assert f'up{{job="{job}"}} == 0' in RULES[1].read_text()
    config = configuration.load(objects["ConfigMap"]["data"]["config.toml"], {}, {})
    spec = objects["StatefulSet"]["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    assert container["ports"][0]["containerPort"] == config.server.port
    (data,) = (mount["mountPath"] for mount in container["volumeMounts"] if mount["name"] == "data")
    assert config.store.data_dir == data
    (cache,) = (each["value"] for each in container["env"] if each["name"] == "XDG_CACHE_HOME")
    assert Path(cache).is_relative_to(data)
    # Else Kubernetes lets the group write to it at each start, and then it is not used.
    assert spec["template"]["spec"]["securityContext"]["fsGroupChangePolicy"] == "OnRootMismatch"
    assert spec["selector"]["matchLabels"] == objects["Service"]["spec"]["selector"]
    assert objects["PodDisruptionBudget"]["spec"]["selector"] == spec["selector"]
    # What the standard "restricted" asks of a pod, and nothing to be written to but what is mounted for it.
    whole, own = spec["template"]["spec"]["securityContext"], container["securityContext"]
    assert (whole["runAsNonRoot"], whole["seccompProfile"]["type"]) == (True, "RuntimeDefault")
    assert (own["allowPrivilegeEscalation"], own["capabilities"]["drop"]) == (False, ["ALL"])
    assert own["readOnlyRootFilesystem"]
    written_to = {mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")}
    assert written_to == {data, "/tmp", "/dev/shm"}
    # Where several processes share a model NCCL wants more of it than a container has.
    (shm,) = (each["emptyDir"] for each in spec["template"]["spec"]["volumes"] if each["name"] == "shm")
    assert shm["medium"] == "Memory"
    # New requests are refused from SIGTERM on, which comes when nodes have had time to hear that the pod leaves.
    program, pause_s = container["lifecycle"]["preStop"]["exec"]["command"]
    assert (program, float(pause_s) > 0) == ("sleep", True)
    assert spec["template"]["spec"]["terminationGracePeriodSeconds"] > (
        float(pause_s) + config.server.drain_s + ending.CLOSING_S
    )
    (claim,) = spec["volumeClaimTemplates"]
    assert claim["spec"].get("storageClassName", "") == storage_class


@pytest.mark.parametrize("claim", ["", "shared"])
def test_pods_share_files_where_a_claim_for_them_is_named(claim):
    values = yaml.safe_load((CHART / "values.yaml").read_text()) | {"filesClaim": claim}
    (found,) = rendered(CHART / "templates" / "statefulset.yaml", values)
    spec = found["spec"]["template"]["spec"]
    claims = {each["name"]: each.get("persistentVolumeClaim") for each in spec["volumes"]}
    mounts = {each["name"]: each["mountPath"] for each in spec["containers"][0]["volumeMounts"]}
    assert claims.get("files") == ({"claimName": claim} if claim else None)
    assert mounts.get("files") == ("/files" if claim else None)


def test_pods_have_the_volumes_and_the_place_that_values_name():
    values = yaml.safe_load((CHART / "values.yaml").read_text()) | {
        "extraVolumes": [{"name": "models", "persistentVolumeClaim": {"claimName": "models", "readOnly": True}}],
        "extraVolumeMounts": [{"name": "models", "mountPath": "/models", "readOnly": True}],
        "runtimeClassName": "nvidia",
        "affinity": {"podAntiAffinity": {}},
    }
    values["image"]["pullSecrets"] = [{"name": "registry"}]
    (found,) = rendered(CHART / "templates" / "statefulset.yaml", values)
    spec = found["spec"]["template"]["spec"]
    assert values["extraVolumes"][0] in spec["volumes"]
    assert spec["volumes"][0]["name"] == "config"
    (container,) = spec["containers"]
    assert container["volumeMounts"][-1] == values["extraVolumeMounts"][0]
    assert (spec["runtimeClassName"], spec["affinity"]) == ("nvidia", values["affinity"])
    assert spec["imagePullSecrets"] == values["image"]["pullSecrets"]


@pytest.mark.parametrize("claim", ["", "shared"])
def test_kubernetes_schemas_know_every_field_of_the_chart(claim):
    kubernetes = pytest.importorskip("kubernetes_validate")  # .ci/run installs it where it can be had
    values = yaml.safe_load((CHART / "values.yaml").read_text()) | {"filesClaim": claim}
    for path in (CHART / "templates").glob("*.yaml"):
        for each in rendered(path, values):
            kubernetes.validate(each, kubernetes.latest_version(), strict=True)


def test_values_that_nobody_reads_are_not_offered():
    templates = "".join(path.read_text() for path in (CHART / "templates").glob("*.yaml"))
    read = set(re.findall(r"\.Values\.([\w.]+)", templates))

    def offered(values: dict[str, Any], before: str = "") -> Iterator[str]:
        for name, value in values.items():
            if isinstance(value, dict) and value and before + name not in read:
                yield from offered(value, f"{before}{name}.")
            else:
                yield before + name

    assert set(offered(yaml.safe_load((CHART / "values.yaml").read_text()))) == read


def test_helm_finds_nothing_wrong_where_it_is_installed():
    helm = shutil.which("helm")
    if helm is not None:
        ran = subprocess.run([helm, "lint", "--strict", CHART], capture_output=True, text=True, env=dict(os.environ))
        assert ran.returncode == 0, ran.stdout + ran.stderr
