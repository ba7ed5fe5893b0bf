import re
from decimal import Decimal
from pathlib import Path

import msgspec
import pytest

from policies import configuration, holding, settings
from policies.policy import Price
from policies.pricelist import Proposed
from policies.upstreams.terms import Upstream

ROOT = Path(__file__).parents[2]


def test_the_documented_file_says_the_defaults():
    assert configuration.load((ROOT / "config.toml").read_text(), {}) == configuration.load("", {})


def test_every_key_is_in_the_documented_file():
    text = (ROOT / "config.toml").read_text()
    sections = [f.type for f in msgspec.structs.fields(settings.Settings) if isinstance(f.type, type)] + [
        settings.Model,
        settings.Speculation,
        holding.KeptGrammars,
    ]
    keys = {field.name for section in sections if section is not dict for field in msgspec.structs.fields(section)}
    assert keys - {"engine", "speculation", "grammars"} <= {line.split(" = ")[0] for line in text.splitlines()}


def test_every_key_in_the_documented_file_says_what_it_is():
    section, silent = "", []  # of classes the first one has words
    for line in (ROOT / "config.toml").read_text().splitlines():
        if line.startswith("["):
            section = line.partition("]")[0].removeprefix("[")
        elif " = " in line and not line.startswith("#") and " # " not in line:
            silent.append((section, line))
    assert [each for each in silent if each[0] not in ("classes.standard", "classes.batch")] == []


def test_every_key_of_an_upstream_is_documented_with_its_default():
    lines = (ROOT / "config.toml").read_text().split("# [[upstreams]]")[1].splitlines()
    documented = "[[upstreams]]\n" + "\n".join(line.removeprefix("# ") for line in lines if " = " in line)
    assert configuration.load(documented, {}).upstreams == (Upstream(name="far-1", model="far", url="https://host/v1"),)
    keys = {line.removeprefix("# ").split(" = ")[0] for line in lines if " = " in line}
    assert keys == set(Upstream.__struct_fields__)


def test_variables_win_over_the_file_and_the_command_line_over_both():
    text = "[server]\nport = 1\nhost = 'a'\nstall_s = 1.0"
    environ = {"PENSTOCK_SERVER__PORT": "2", "PENSTOCK_SERVER__HOST": "b", "PENSTOCK_API_KEY": "not a setting"}
    loaded = configuration.load(text, environ, {"server.port": 3})
    assert (loaded.server.port, loaded.server.host, loaded.server.stall_s) == (3, "b", 1.0)


def test_a_model_overrides_single_engine_keys():
    loaded = configuration.load("[engine]\nblock_size = 64\n[models.a]\n[models.b.engine]\ndtype = 'float32'", {})
    assert loaded.models["a"].engine == settings.Engine(block_size=64)
    assert loaded.models["b"].engine == settings.Engine(block_size=64, dtype="float32")


def test_a_model_overrides_single_keys_of_the_engines_tables_too():
    text = "[engine.speculation]\nenabled = false\n[models.a.engine.speculation]\nmax_draft_tokens = 8"
    loaded = configuration.load(text, {})
    assert loaded.models["a"].engine.speculation == settings.Speculation(enabled=False, max_draft_tokens=8)


def test_no_number_of_the_settings_is_without_an_end():
    every = configuration.load("", {})
    for path, value in numbers_of(msgspec.to_builtins(every)):
        for endless in ("inf", "nan") if isinstance(value, float) else ("1" + "0" * 40,):
            variable = "PENSTOCK_" + "__".join(path).upper()
            with pytest.raises(configuration.SettingsError, match=rf"^{variable}: {re.escape('.'.join(path))}: "):
                configuration.load("", {variable: endless})


def numbers_of(table, path=()):
    for key, value in table.items():
        if isinstance(value, dict):
            yield from numbers_of(value, (*path, key))
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            yield (*path, key), value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[server]\nprot = 1", "unknown key server.prot; did you mean server.port?"),
        ("[servre]\nport = 1", "unknown key servre; did you mean server?"),
        ("[server]\nport = 'x'", "server.port: expected `int`, got `str`"),
        ("[server]\nport = 70000", "server.port: expected `int` <= 65535"),
        ("server = 1", "server: expected `object`, got `int`"),
        ("models = 1", "models: expected `object`, got `int`"),
        ("[models]\na = 1", "models.a: expected a table, got `int`"),
        ("classes = 3", "classes: expected `object`, got `int`"),
        ("[classes]\nbatch = 3", "classes.batch: expected a table, got `int`"),
        ("[classes.batch]\nshare = 'x'", "classes.batch.share: expected `float`, got `str`"),
        ("[models.a]\nreplicas = -1", "models.a.replicas: expected `int` >= 0"),
        ("[models.a]\nengine = 3", "models.a.engine: expected `object`, got `int`"),
        ("[models.a]\n[models.b.engine.speculation]\nenabled = 3", "models.b.engine.speculation.enabled: expected"),
        ("[policies.a]\nweight = inf", "policies.a.weight: expected `float` <= 1000"),
        ("[ledger]\nclose_after_s = inf", "ledger.close_after_s: expected `float` <= 10000000000"),
        ("[responses]\nretention_s = 1e300", "responses.retention_s: expected `float` <= 10000000000"),
        ("[store]\nledger_flush_ms = nan", "store.ledger_flush_ms: expected `float` >= 0"),
        ("[store]\ndata_dir = ''", "store.data_dir: expected `str` of length >= 1"),
        ("[classes.batch]\nttft_ms = inf", "classes.batch.ttft_ms: expected `float` <= 10000000000000"),
        ("[engine]\nmax_slowdown = inf", "engine.max_slowdown: expected `float` <="),
        ("[engine]\nnum_threads = 100000", "engine.num_threads: expected `int` <= 1024"),
        ("[files]\nmax_tenant_bytes = 9223372036854775808", "files.max_tenant_bytes: expected `int` <="),
        ("[models.'']", "models: expected `str` of length >= 1"),
        ("[models.a.adapters]\n'' = 'a'", "models.a.adapters: expected `str` of length >= 1"),
        ("[policies.'a b']", "policies: expected `str` matching regex"),
        (
            "[models.a.engine]\nblok_size = 1",
            "unknown key models.a.engine.blok_size; did you mean models.a.engine.block_size?",
        ),
        *(
            (f"[models.a]\naddresses = ['unix:/a', '{address}']", "models.a.addresses[1]: it is neither")
            for address in ("nowhere", "unix:", "tcp:host", "tcp::1", "tcp:host:70000", "http://host:80")
        ),
        ("[models.a]\nreplicas = 0", "models.a: it has neither replicas nor addresses"),
        ("[engine]\ndtype = 'int3'", "dtype: expected one of 'auto', 'bfloat16', 'float16', 'float32', got 'int3'"),
        (
            "[[upstreams]]\nname = 'a'\nmodel = 'a'\nurl = 'http://h/v1'\nchoice = 'cost'",
            "upstreams[0].choice: expected one of 'latency', 'weight', got 'cost'",
        ),
        ("[models.a]\nreasoning_parser = 'r1'", "models.a.reasoning_parser: expected one of 'auto', 'mistral', 'none'"),
        ("[engine", "not valid TOML"),
        ("prices = 1", "prices: expected `array`, got `int`"),
        ("[upstreams]\nname = 'a'", "upstreams: each of them begins with [[upstreams]], in two brackets"),
        ("[prices.demo]\nprompt = 1", "prices: each of them begins with [[prices]], in two brackets"),
        ("[[models]]\nname = 'a'", "models: each of them has its name in its heading: [models.NAME]"),
        ("[[sinks]]\nkind = 'lago'", "sinks: each of them has its name in its heading: [sinks.NAME]"),
        ('[billing]\ncurrency = "USD\\n"', "billing.currency: expected `str` matching regex"),
        ("[[prices]]\nmodle = 'a'", "unknown key prices[0].modle; did you mean prices[0].model?"),
        ("[[prices]]\nmodel = 'a'", "prices[0]: object missing required field `price`"),
        ("[[prices]]\nprice = { promt = 1 }", "prices[0].price: object contains unknown field `promt`"),
        ("[[prices]]\nprice = { prompt = 0.0000001 }", "prices[0].price.prompt: must be 0 or more"),
        ("[[prices]]\nprice = { prompt = 0.10000000000000000000000001 }", "prices[0].price.prompt: must be 0 or more"),
        ("[[prices]]\nprice = {}\nsla_class = 'gold'", "prices[0].sla_class: there is no class gold"),
        ("[[prices]]\nprice = {}\ncurrency = 'EUR'", "prices[0].currency: all prices are in USD"),
        (
            "[[prices]]\nprice = {}\n[[prices]]\nprice = {}",
            "prices[1]: it is for the same model and class as",
        ),
        ("[policies.a]\ndiscount = 1.0", "policies.a.discount: must be 0 or more and less than 1"),
        ("[server]\nstall_s = 0.0", "server.stall_s"),
        ("[server]\ntls_cert = 'a.pem'", "server.tls_key: a certificate and its key are needed, or neither"),
        ("[server]\ntls_key = 'a.pem'", "server.tls_cert"),
        ("[server]\ntrusted_proxies = ['10.0.0.1/8']", "server.trusted_proxies: 10.0.0.1/8 has host bits set"),
        ("[server]\ncors_origins = ['app.example.com']", "server.cors_origins"),
        ('[store]\ndata_dir = "a\\u0000b"', "store.data_dir: it has a NUL character in it"),
        ('[models.a]\naddresses = ["unix:/a", "unix:/\\u0000"]', "models.a.addresses[1]: it has a NUL character"),
        *(
            (f"[metrics]\notlp_endpoint = '{address}'", "metrics.otlp_endpoint: it is no address of a collector")
            for address in ("collector", "localhost:4318", "ftp://a:1", "http://", "http://a:99999", "http://a:1 b")
        ),
        ("[metrics]\notlp_protocol = 'grpc'\notlp_endpoint = 'ftp://a:1'", "metrics.otlp_endpoint: it is no address"),
        ("[tracing]\nendpoint = 'ftp://a:1'", "tracing.endpoint: it is no address of a collector"),
        ("[tracing]\nprotocol = 'http/protobuf'\nendpoint = 'localhost:4318'", "tracing.endpoint: it is no address"),
    ],
)
def test_what_cannot_be_used_is_named(text, message):
    with pytest.raises(configuration.SettingsError, match=r"^config\.toml") as caught:
        configuration.load(text, {})
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "address", ["http://[::1]:4317/", "https://collector", "collector:4317", "unix:/run/otel.sock"]
)
def test_a_collector_is_named_as_the_protocol_names_its_servers(address):
    text = f"[metrics]\notlp_protocol = 'grpc'\notlp_endpoint = '{address}'\n[tracing]\nendpoint = '{address}'"
    loaded = configuration.load(text, {})
    assert loaded.metrics.otlp_endpoint == loaded.tracing.endpoint == address


def test_a_variable_that_contradicts_the_file_is_named():
    with pytest.raises(configuration.SettingsError, match="server is no table"):
        configuration.load("server = 1", {"PENSTOCK_SERVER__PORT": "1"})


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("PENSTOCK_SERVER__PROT", "1", "unknown key server.prot; did you mean server.port?"),
        ("PENSTOCK_SERVRE__PORT", "1", "unknown key servre; did you mean server?"),
        ("PENSTOCK_SERVER__PORT", "many", "server.port: expected `int`, got `str`"),
        ("PENSTOCK_SERVER__TRUSTED_PROXIES", "['10.0.0.1/8']", "server.trusted_proxies: 10.0.0.1/8 has host bits set"),
        ("PENSTOCK_SERVER__CORS_ORIGINS", "[1]", "server.cors_origins[0]"),
        ("PENSTOCK_MODELS__A__REPLICAS", "two", "models.a.replicas: expected `int`, got `str`"),
    ],
)
def test_what_a_variable_says_is_said_of_the_variable(variable, value, message):
    with pytest.raises(configuration.SettingsError) as caught:
        configuration.load("[server]\nhost = '127.0.0.2'", {variable: value, "PENSTOCK_ENGINE__BLOCK_SIZE": "16"})
    assert str(caught.value).startswith(f"{variable}: {message}")


def test_a_variable_with_one_underscore_where_two_belong_is_pointed_out():
    environ = {
        "PENSTOCK_STORE_URL": "postgresql://db/penstock",
        "PENSTOCK_MAX_BODY_BYTES": "1",
        "PENSTOCK_SERVER_MAX_BODY_BYTES": "1",
        # Another program's, put into the setting by whoever starts both; and what Kubernetes tells of its services.
        "PENSTOCK_REDIS_URL": "redis://cache",
        "PENSTOCK_REDIS__URL": "redis://cache",
        "PENSTOCK_SERVER_PORT": "tcp://10.0.0.1:80",
        "PENSTOCK_PORT": "tcp://10.0.0.2:80",
        # Of the commands and of secrets.
        **dict.fromkeys(("PENSTOCK_URL", "PENSTOCK_API_KEY", "PENSTOCK_WEBHOOK_SECRET", "PENSTOCK_OLLAMA_KEY"), "x"),
    }
    assert dict(configuration.misspelt(environ)) == {
        "PENSTOCK_STORE_URL": "PENSTOCK_STORE__URL",
        "PENSTOCK_SERVER_MAX_BODY_BYTES": "PENSTOCK_SERVER__MAX_BODY_BYTES",
    }


def test_what_a_file_says_is_said_of_the_file_by_its_name():
    with pytest.raises(configuration.SettingsError, match=r"^other\.toml: server\.port: "):
        configuration.load("[server]\nport = 'x'", {"PENSTOCK_SERVER__HOST": "127.0.0.2"}, name="other.toml")


def test_money_is_exactly_what_was_written():
    text = "[[prices]]\nprice = { prompt = 0.1, completion = 1234.567891, request = 3, engine_second = '0.000001' }"
    loaded = configuration.load(text, {"PENSTOCK_POLICIES__A__DISCOUNT": "0.1234"})
    assert loaded.prices == (
        Proposed(
            price=Price(
                prompt=Decimal("0.1"),
                completion=Decimal("1234.567891"),
                request=Decimal(3),
                engine_second=Decimal("0.000001"),
            )
        ),
    )
    assert loaded.policies["a"].discount == Decimal("0.1234")


def test_devices_that_are_named_are_enough_for_all_ranks_of_all_replicas():
    named = "[models.m]\nreplicas = 2\n[models.m.engine]\ntensor_parallel = 2\ndevices = "
    assert configuration.load(named + "[0, 1, 0, 1]", {}).models["m"].engine.devices == (0, 1, 0, 1)
    few = r"models\.m\.engine\.devices: 2 replicas of 2 ranks take 4 CUDA devices, but 3 are named"
    with pytest.raises(configuration.SettingsError, match=few):
        configuration.load(named + "[0, 1, 2]", {})
    assert configuration.load(named + '[0]\ndevice = "cpu"', {}).models["m"].engine.devices == (0,)


def test_a_model_comes_and_goes_only_where_its_workers_are_this_gateways_own():
    elsewhere = '[models.m]\nidle_unload_s = 60\naddresses = ["unix:/w"]'
    with pytest.raises(configuration.SettingsError, match=r"models\.m\.idle_unload_s: it has workers elsewhere"):
        configuration.load(elsewhere, {})
    assert configuration.load("[models.m]\nidle_unload_s = 60", {}).models["m"].idle_unload_s == 60
