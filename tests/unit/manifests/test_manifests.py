"""The manifests are valid, contain no secrets, and ask for no unnecessary rights or privileges."""

from __future__ import annotations

import re
import shutil
from importlib.metadata import version

import kubernetes_validate
import pytest
import yaml

from steadytrain.components.observe.prometheus import PATH
from steadytrain.components.shared.config.secrets import find_secrets
from steadytrain.components.train.launch.naming import run_labels
from steadytrain.pipelines.cluster.doctor import PYTORCHJOB_RIGHTS, RIGHTS, Right
from steadytrain.pipelines.cluster.trial import LABELS as TRIAL_LABELS
from steadytrain.pipelines.pod_names import (
    METRICS_LABEL,
    NAME,
    SCRAPE_ANNOTATIONS,
    STEP_LABELS,
)

from support.manifests import COMPONENTS, MANIFESTS, OF_THE_CLUSTER, OVERLAYS, build, pods

KUBERNETES = ("1.29", "1.34")
# The schemas of these kinds exist only in the cluster.
CUSTOM = {"LocalQueue", "PodDefault", "PodMonitor", "PrometheusRule"}
# Components that conflict with another component because both set the same thing.
AT_ODDS = {"s3-irsa"}
STACKS = [
    *((overlay, ()) for overlay in OVERLAYS),
    *(("standalone", (component,)) for component in COMPONENTS),
    ("kubeflow-profile", tuple(name for name in COMPONENTS if name not in AT_ODDS)),
]


@pytest.fixture(params=STACKS, ids=lambda stack: "+".join([stack[0], *stack[1]]), scope="module")
def objects(request, tmp_path_factory):
    if shutil.which("kubectl") is None:
        pytest.skip("needs kubectl, which builds the overlays")
    return build(*request.param, tmp_path_factory.mktemp("stack"))


@pytest.fixture(scope="module")
def standalone(tmp_path_factory):
    if shutil.which("kubectl") is None:
        pytest.skip("needs kubectl, which builds the overlays")
    return build("standalone", (), tmp_path_factory.mktemp("standalone"))


def whole_objects():
    for path in sorted(MANIFESTS.rglob("*.yaml")):
        for item in yaml.safe_load_all(path.read_text()):
            if path.name != "kustomization.yaml":
                yield pytest.param(item, id=f"{path.stem}-{item['kind']}")


@pytest.mark.parametrize("item", list(whole_objects()))
def test_each_file_is_valid(item):
    """This also runs without kubectl."""
    for kubernetes in KUBERNETES:
        check(item, kubernetes)


@pytest.mark.slow
def test_each_stack_is_valid(objects):
    for item in objects:
        for kubernetes in KUBERNETES:
            check(item, kubernetes)


def check(item, kubernetes):
    if item["kind"] in CUSTOM or (item["kind"] in OF_THE_CLUSTER and kubernetes == "1.29"):
        return  # admission policies are in version 1 from 1.30
    kubernetes_validate.validate(item, kubernetes, strict=True)


def test_invalid_manifest_is_detected():
    """Make sure that the validation can fail."""
    account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "a"}}
    check(account, "1.34")
    with pytest.raises(kubernetes_validate.ValidationError, match="automount"):
        check({**account, "automount": False}, "1.34")


def test_all_objects_are_in_one_namespace(objects):
    placed = {
        item["metadata"].get("namespace") for item in objects if item["kind"] not in OF_THE_CLUSTER
    }
    (namespace,) = placed
    assert namespace
    for item in objects:
        if item["kind"] in OF_THE_CLUSTER:
            assert "namespace" not in item["metadata"]
        if item["kind"] == "ValidatingAdmissionPolicyBinding":
            selector = item["spec"]["matchResources"]["namespaceSelector"]
            assert selector == {"matchLabels": {"kubernetes.io/metadata.name": namespace}}


def test_every_image_has_a_version(objects):
    for pod in pods(objects):
        for container in pod["containers"]:
            assert re.fullmatch(r".+:v?\d+\.\d+\.\d+[-\w]*", container["image"])


def test_product_images_have_this_version(standalone):
    images = {one["image"] for pod in pods(standalone) for one in pod["containers"]}
    assert images == {f"steadytrain/train:{version('steadytrain')}"}


def test_pods_are_restricted(objects):
    """They meet the Pod Security level `restricted`, and their root file system is read-only."""
    for pod in pods(objects):
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] > 0
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in pod["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }


def test_pods_have_requests_limits_and_probes(objects):
    for pod in pods(objects):
        for container in pod["containers"]:
            for kind in ("requests", "limits"):
                assert container["resources"][kind].keys() == {"cpu", "memory"}
            assert {"startupProbe", "readinessProbe", "livenessProbe"} <= container.keys()


def test_secrets_are_referenced_and_never_embedded(objects):
    assert "Secret" not in {item["kind"] for item in objects}
    # A mapping of this name only refers to a token that the kubelet creates.
    found = [one for one in find_secrets(objects) if not one.field.endswith(".serviceAccountToken")]
    assert not found
    for pod in pods(objects):
        for container in pod["containers"]:
            for variable in container.get("env", []):
                secret = re.search("KEY|TOKEN|PASSWORD|SECRET", variable["name"])
                assert not (secret and "value" in variable)


def test_database_address_comes_only_from_a_secret(tmp_path, standalone):
    built = build("standalone", ("mlflow-database",), tmp_path)
    (container,) = (one for pod in pods(built) for one in pod["containers"])
    stores = [one for one in container["env"] if one["name"] == "MLFLOW_BACKEND_STORE_URI"]
    reference = {"name": "steadytrain-mlflow-database", "key": "uri"}
    assert stores == [
        {"name": "MLFLOW_BACKEND_STORE_URI", "valueFrom": {"secretKeyRef": reference}}
    ]


def test_rights_are_listed_explicitly(objects):
    roles = [item for item in objects if item["kind"] == "Role"]
    assert len(roles) == 1
    assert not [item for item in objects if item["kind"].startswith("ClusterRole")]
    for rule in roles[0]["rules"]:
        assert "*" not in [*rule["apiGroups"], *rule["resources"], *rule["verbs"]]
        assert "secrets" not in rule["resources"]


@pytest.mark.parametrize(
    ("components", "rights"), [((), RIGHTS), (("pytorchjob",), PYTORCHJOB_RIGHTS)]
)
def test_admission_policy_covers_whatever_the_role_may_create(
    tmp_path, standalone, components, rights
):
    built = build("standalone", components, tmp_path)
    (policy,) = (item for item in built if item["kind"] == "ValidatingAdmissionPolicy")
    covered = {
        (group, resource)
        for rule in policy["spec"]["matchConstraints"]["resourceRules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        if "CREATE" in rule["operations"]
    }
    created = {(right.group, right.resource) for right in rights if "create" in right.verbs}
    assert created <= covered
    assert policy["spec"]["failurePolicy"] == "Fail"


@pytest.mark.parametrize(
    ("components", "rights"), [((), RIGHTS), (("pytorchjob",), PYTORCHJOB_RIGHTS)]
)
def test_role_matches_the_doctors_checks(tmp_path, standalone, components, rights):
    built = build("standalone", components, tmp_path)
    (role,) = (item for item in built if item["kind"] == "Role")
    stated = [
        Right(group, resource, tuple(rule["verbs"]))
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
    ]
    assert tuple(stated) == rights


def test_volume_matches_the_pipelines_mount(objects):
    claims = {
        item["metadata"]["name"]: item["spec"]["accessModes"]
        for item in objects
        if item["kind"] == "PersistentVolumeClaim"
    }
    assert claims[NAME] in (["ReadWriteMany"], ["ReadWriteOnce"])


def test_binding_names_the_account_that_steps_run_under(tmp_path, standalone):
    expected = {
        "standalone": ("pipeline-runner", "kubeflow"),
        "kubeflow-profile": ("default-editor", "my-profile"),
    }
    assert expected.keys() == set(OVERLAYS)
    for overlay, (name, namespace) in expected.items():
        built = build(overlay, (), tmp_path)
        (binding,) = (item for item in built if item["kind"] == "RoleBinding")
        subject = {"kind": "ServiceAccount", "name": name, "namespace": namespace}
        assert binding["subjects"] == [subject]


def test_every_product_pod_has_a_default_deny_policy(objects):
    """Once a policy selects a pod, the pod has only the traffic that policies allow.

    This applies in the directions that the policy names.
    """
    deployed = [
        item["spec"]["template"]["metadata"]["labels"]
        for item in objects
        if item["kind"] == "Deployment"
    ]
    for labels in [*deployed, STEP_LABELS, TRIAL_LABELS, run_labels("some-run")]:
        selecting = [item for item in objects if selects(item, labels)]
        assert len(selecting) == 1
        assert selecting[0]["spec"]["policyTypes"] == ["Ingress", "Egress"]


def selects(item, labels):
    return item["kind"] == "NetworkPolicy" and picks(item["spec"]["podSelector"], labels)


def picks(selector, labels):
    """Return whether a label selector matches a pod with these labels."""
    assert selector.keys() <= {"matchLabels", "matchExpressions"}
    fits = selector.get("matchLabels", {}).items() <= labels.items()
    for one in selector.get("matchExpressions", []):
        known = {
            "Exists": one["key"] in labels,
            "In": labels.get(one["key"]) in one.get("values", []),
        }
        fits = fits and known[one["operator"]]
    return fits


def test_only_our_pods_reach_the_tracking_server(objects):
    """Only steps, the doctor's trial pod, and training pods reach it."""
    (policy,) = (
        item
        for item in objects
        if item["kind"] == "NetworkPolicy" and item["metadata"]["name"] == "steadytrain-mlflow"
    )
    (rule,) = policy["spec"]["ingress"]
    assert all(peer.keys() == {"podSelector"} for peer in rule["from"])
    ours = [STEP_LABELS, run_labels("some-run"), TRIAL_LABELS]
    strangers = [{}, {"app": "notebook"}, {"app.kubernetes.io/part-of": "steadytrain"}]
    for labels, welcome in [*((one, True) for one in ours), *((one, False) for one in strangers)]:
        assert any(picks(peer["podSelector"], labels) for peer in rule["from"]) is welcome


def test_prometheus_reaches_the_pod_that_serves_metrics_and_no_other_step(tmp_path):
    if shutil.which("kubectl") is None:
        pytest.skip("needs kubectl, which builds the overlays")
    built = build("standalone", ("monitoring",), tmp_path)
    (monitor,) = (item for item in built if item["kind"] == "PodMonitor")
    assert (
        monitor["spec"]["selector"]["matchLabels"].items()
        <= (STEP_LABELS | dict([METRICS_LABEL])).items()
    )
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert endpoint["path"] == PATH == SCRAPE_ANNOTATIONS["prometheus.io/path"]
    port = SCRAPE_ANNOTATIONS["prometheus.io/port"]
    addresses = [item for item in endpoint["relabelings"] if "targetLabel" in item]
    for pod, address in (("10.1.2.3", f"10.1.2.3:{port}"), ("fd00::7", f"[fd00::7]:{port}")):
        (found,) = (
            re.sub(rule["regex"], rule["replacement"].replace("$1", r"\1"), pod)
            for rule in addresses
            if re.fullmatch(rule["regex"], pod)
        )
        assert found == address
    (policy,) = (
        item
        for item in built
        if item["kind"] == "NetworkPolicy" and item["metadata"]["name"] == "steadytrain-steps"
    )
    (ingress,) = policy["spec"]["ingress"]
    assert ingress["ports"] == [{"protocol": "TCP", "port": int(port)}]
    (dashboards,) = (item for item in built if item["metadata"]["name"] == "steadytrain-dashboards")
    assert dashboards["data"].keys() == {"fleet.json", "run.json"}
