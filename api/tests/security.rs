//! Who a served program lets in: keys from files and from the environment, TLS, addresses. Owner: the serve command.
//! The certificates in `tests/tls` are self-signed for localhost; their keys are of no other use.

mod support;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use support::{Folder, Serving, program, root, run};
use ureq::tls::{Certificate, RootCerts, TlsConfig};

const PATIENCE: Duration = Duration::from_secs(60);

const KEYS: &str = "# two of them\n\nfirst-key-of-two\n  second-key-of-two  \n";

fn launch(folder: &Folder, server: &str) -> String {
    let model = root().join("config/demo/small");
    let text = format!("[[models]]\nname = \"m\"\npath = \"{}\"\n[server]\n{server}\n", model.display());
    folder.write("launch.toml", &text).display().to_string()
}

fn pem(name: &str) -> PathBuf {
    root().join("api/tests/tls").join(name)
}

/// Takes every status for an answer.
fn agent() -> ureq::Agent {
    let config = ureq::Agent::config_builder().http_status_as_error(false).proxy(None);
    config.timeout_global(Some(PATIENCE)).build().new_agent()
}

/// Status of a request with this key.
fn status(serving: &Serving, path: &str, key: Option<&str>) -> u16 {
    let request = agent().get(format!("http://{}{path}", serving.address));
    let request =
        key.into_iter().fold(request, |request, key| request.header("authorization", format!("Bearer {key}")));
    request.call().expect("an answer").status().as_u16()
}

#[test]
fn keys_come_from_the_file_and_from_the_environment_and_are_shown_nowhere() {
    let folder = Folder::new();
    folder.write("keys", KEYS);
    folder.write("admin", "the-admin-key\n");
    let config = launch(&folder, "api_keys_file = \"keys\"\nadmin_key_file = \"admin\"\nlog_level = \"trace\"");
    let mut command = program(&folder, &["--config", &config]);
    command.env("TOKENROUTER_API_KEYS", "third-key-of-three");
    let serving = Serving::start(command);
    for key in ["first-key-of-two", "second-key-of-two", "third-key-of-three", "the-admin-key"] {
        assert_eq!(status(&serving, "/v1/models", Some(key)), 200, "{key}");
    }
    for wrong in [None, Some("# two of them"), Some("first-key-of-tw"), Some("")] {
        assert_eq!(status(&serving, "/v1/models", wrong), 401, "{wrong:?}");
        assert_eq!(status(&serving, "/metrics", wrong), 401, "{wrong:?}");
    }
    assert_eq!((status(&serving, "/health", None), status(&serving, "/ready", None)), (200, 200));
    let banner = serving.banner.clone();
    let log = serving.stop_and_read();
    let (code, checked, err) = run(&folder, &["check", "--config", &config, "--log-level", "trace"]);
    assert_eq!(code, 0, "{err}");
    assert!(checked.contains("api_keys_file = ") && log.contains("http request"), "{checked}{log}");
    for key in ["first-key", "second-key", "third-key", "the-admin-key"] {
        assert!(![&banner, &log, &checked, &err].iter().any(|text| text.contains(key)), "{key} is shown");
    }
}

#[test]
fn the_admin_key_guards_the_reload() {
    let folder = Folder::new();
    let config = launch(&folder, "");
    let mut command = program(&folder, &["--config", &config]);
    command.env("TOKENROUTER_ADMIN_KEY", "the-admin-key");
    let serving = Serving::start(command);
    for path in ["/admin/reload", "/%61dmin/reload"] {
        for (key, expected) in [("the-admin-key", 200), ("another-key", 401)] {
            let request = agent().post(format!("http://{}{path}", serving.address));
            let answer = request.header("x-api-key", key).send_empty().expect("an answer");
            let found = answer.status().as_u16();
            assert!(found == expected || path.contains('%') && found == 404, "{path} with {key}: {found}");
        }
    }
    assert_eq!(status(&serving, "/v1/models", None), 200, "there are no API keys");
    assert_eq!(serving.stop(), 0);
}

#[test]
fn keys_are_read_again_on_a_signal_and_stay_when_their_file_is_wrong() {
    let folder = Folder::new();
    folder.write("keys", "first-key-of-two\n");
    folder.write("admin", "the-admin-key\n");
    let config = launch(&folder, "api_keys_file = \"keys\"\nadmin_key_file = \"admin\"");
    let serving = Serving::start(program(&folder, &["--config", &config]));
    let all = |expected: [u16; 3]| {
        for (key, expected) in ["first-key-of-two", "second-key-of-two", "the-admin-key"].into_iter().zip(expected) {
            assert_eq!(status(&serving, "/v1/models", Some(key)), expected, "{key}");
        }
    };
    all([200, 401, 200]);
    folder.write("keys", "second-key-of-two\n");
    all([200, 401, 200]);
    serving.signal("HUP");
    serving.logged("clients need the keys as they are now");
    all([401, 200, 200]);
    for (text, says) in [("brief\n", "line 1 is no key"), ("# none\n", "holds no key"), ("", "holds no key")] {
        folder.write("keys", text);
        serving.signal("HUP");
        let said = serving.logged("the keys are as before");
        assert!(said.contains("/keys: ") && said.contains(says) && !said.contains("brief"), "{said}");
        all([401, 200, 200]);
    }
    std::fs::remove_file(folder.path.join("keys")).expect("removed");
    serving.signal("HUP");
    assert!(serving.logged("the keys are as before").contains("cannot be read"));
    all([401, 200, 200]);
    assert_eq!(serving.stop(), 0);
}

#[test]
fn other_machines_are_let_in_only_with_keys_or_on_demand() {
    let folder = Folder::new();
    folder.write("keys", KEYS);
    let open = launch(&folder, "host = \"0.0.0.0\"");
    let (code, out, err) = run(&folder, &["serve", "--config", &open, "--port", "0"]);
    assert_eq!((code, out.as_str(), err.lines().count()), (2, "", 1), "{err}");
    for part in
        ["launch.toml:5:8: 0.0.0.0 lets other machines in", "api_keys_file", "TOKENROUTER_API_KEYS", "--insecure"]
    {
        assert!(err.contains(part), "`{err}` lacks `{part}`");
    }
    for host in ["::", "0.0.0.0"] {
        let (code, _, err) = run(&folder, &["serve", "--host", host, "--port", "0"]);
        assert_eq!(code, 2, "--host {host}: {err}");
    }
    for server in ["host = \"0.0.0.0\"\ninsecure = true", "host = \"0.0.0.0\"\napi_keys_file = \"keys\""] {
        let config = launch(&folder, server);
        let serving = Serving::start(program(&folder, &["--config", &config]));
        assert!(serving.banner.contains("http://0.0.0.0:"), "{}", serving.banner);
        assert_eq!(serving.stop(), 0);
    }
}

#[test]
fn wrong_key_and_certificate_files_are_refused_by_line() {
    let folder = Folder::new();
    let first = (pem("first.cert.pem").display().to_string(), pem("first.key.pem").display().to_string());
    let second = pem("second.key.pem").display().to_string();
    folder.write("empty", "# none\n");
    folder.write("short", "first-key-of-two\nshort\n");
    folder.write("spaces", "two words of a key\n");
    folder.write("two", KEYS);
    let tls = |cert: &str, key: &str| format!("[server.tls]\ncert = \"{cert}\"\nkey = \"{key}\"");
    for (server, place, parts) in [
        ("api_keys_file = \"absent\"".to_owned(), ":5:17", ["absent: cannot be read", "No such file"]),
        ("api_keys_file = \"empty\"".to_owned(), ":5:17", ["holds no key", "one a line"]),
        ("api_keys_file = \"short\"".to_owned(), ":5:17", ["line 2 is no key", "8 to 512"]),
        ("api_keys_file = \"spaces\"".to_owned(), ":5:17", ["line 1 is no key", "without spaces"]),
        ("admin_key_file = \"two\"".to_owned(), ":5:18", ["holds 2 keys", "give one"]),
        (tls("absent.pem", &first.1), ":6:8", ["absent.pem: cannot be read as PEM", "No such file"]),
        (tls(&first.1, &first.1), ":6:8", ["first.key.pem", "holds no certificate"]),
        (tls(&first.0, &first.0), ":7:7", ["first.cert.pem", "holds no private key"]),
        (tls(&first.0, &second), ":7:7", ["second.key.pem", "is not the key of"]),
    ] {
        let config = launch(&folder, &server);
        for command in ["check", "serve"] {
            let (code, out, err) = run(&folder, &[command, "--config", &config]);
            assert_eq!((code, out.as_str(), err.lines().count()), (2, "", 1), "{command} {server}: {err}");
            assert!(err.starts_with(&format!("error: {config}{place}: ")), "{command}: {err}");
            assert!(parts.iter().all(|part| err.contains(part)), "`{err}` lacks one of {parts:?}");
            assert!(!err.contains("first-key") && !err.contains("two words"), "{err}");
        }
    }
}

/// Asks over HTTPS and trusts this certificate alone.
fn ask_securely(address: &str, trusted: &str) -> Result<u16, ureq::Error> {
    let text = std::fs::read(pem(trusted)).expect("the file is there");
    let roots = RootCerts::Specific(Arc::new(vec![Certificate::from_pem(&text).expect("a certificate")]));
    let tls = TlsConfig::builder().root_certs(roots).build();
    let config = ureq::Agent::config_builder().tls_config(tls).proxy(None).timeout_global(Some(PATIENCE)).build();
    config.new_agent().get(format!("https://{address}/v1/models")).call().map(|answer| answer.status().as_u16())
}

#[test]
fn tls_serves_and_takes_a_new_certificate_without_a_stop() {
    let folder = Folder::new();
    let install = |name: &str| {
        for part in ["cert.pem", "key.pem"] {
            std::fs::copy(pem(&format!("{name}.{part}")), folder.path.join(part)).expect("copied");
        }
    };
    install("first");
    let config = launch(&folder, "[server.tls]\ncert = \"cert.pem\"\nkey = \"key.pem\"");
    let serving = Serving::start(program(&folder, &["--config", &config]));
    assert!(serving.banner.contains("serving   https://127.0.0.1:"), "{}", serving.banner);
    assert_eq!(ask_securely(&serving.address, "first.cert.pem").expect("an answer"), 200);
    assert!(ask_securely(&serving.address, "second.cert.pem").is_err(), "another certificate is not trusted");
    assert!(!plain(&serving.address), "plain HTTP is not answered");
    install("second");
    serving.signal("HUP");
    serving.logged("new connections get the certificate as it is now");
    assert_eq!(ask_securely(&serving.address, "second.cert.pem").expect("an answer"), 200);
    assert!(ask_securely(&serving.address, "first.cert.pem").is_err(), "the old one is not shown any more");
    folder.write("key.pem", "broken");
    serving.signal("HUP");
    let said = serving.logged("the certificate is as before");
    assert!(said.contains("key.pem") && !said.contains("PRIVATE"), "{said}");
    assert_eq!(ask_securely(&serving.address, "second.cert.pem").expect("an answer"), 200);
    assert_eq!(serving.stop(), 0);
}

/// Whether a server answers to plain HTTP.
fn plain(address: &str) -> bool {
    agent().get(format!("http://{address}/health")).call().is_ok_and(|answer| answer.status() == 200)
}
