//! What the process environment says. Owner: the command that was given, once at its start. Invariant: no other code of
//! the server reads environment variables (a tidy test checks this).

use crate::hub::HubSettings;
use crate::telemetry::Settings;
use hf_hub::Cache;
use std::fmt;
use std::path::PathBuf;
use tokenrouter_core::routing::catalog::Catalog;

/// The hub that is asked when HF_ENDPOINT is not set.
const HUB: &str = "https://huggingface.co";

/// A text that is never printed.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    /// The text.
    pub fn reveal(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret")
    }
}

/// The variables that mean something here.
#[derive(Clone, Debug)]
pub struct Environment {
    /// HF_ENDPOINT, HF_HOME and HF_TOKEN; an error when no folder for downloads can be told.
    pub hub: Result<HubSettings, String>,
    /// RUST_LOG: a filter for log lines.
    pub log_filter: Option<String>,
    /// NO_COLOR is set, or TERM is `dumb`.
    pub no_color: bool,
    /// Where files of the program itself may be kept: XDG_CACHE_HOME, or `.cache` at home, or the temporary folder.
    pub cache: PathBuf,
    /// TOKENROUTER_API_KEYS: keys for the API, with commas or white space between them.
    pub api_keys: Option<Secret>,
    /// TOKENROUTER_ADMIN_KEY: the key for `/admin`.
    pub admin_key: Option<Secret>,
    /// OPENAI_API_KEY: the key that `bench serve` sends.
    pub openai_api_key: Option<Secret>,
    /// OTEL_EXPORTER_OTLP_ENDPOINT and its kin: where traces go; an error when they ask for what cannot be done.
    pub telemetry: Result<Option<Settings>, String>,
    /// TOKENROUTER_FAULTS is 1: a launch file may order faults.
    pub faults: bool,
    /// The routing algorithms of this program; more than the usual ones if it adds its own.
    pub catalog: Catalog,
}

impl Environment {
    /// Reads the variables of this process.
    pub fn read() -> Environment {
        Environment::of(|name| std::env::var(name).ok(), std::env::home_dir())
    }

    fn of(variable: impl Fn(&str) -> Option<String>, home: Option<PathBuf>) -> Environment {
        let variable = |name: &str| variable(name).filter(|value: &String| !value.trim().is_empty());
        let user_cache = variable("XDG_CACHE_HOME").map(PathBuf::from).or_else(|| home.map(|home| home.join(".cache")));
        let hub_home = variable("HF_HOME")
            .map(PathBuf::from)
            .or_else(|| user_cache.as_ref().map(|cache| cache.join("huggingface")));
        let endpoint = variable("HF_ENDPOINT").unwrap_or_else(|| HUB.to_owned());
        let hub = hub_home.ok_or_else(|| "no folder for downloads is known; set HF_HOME".to_owned()).map(|folder| {
            let cache = folder.join("hub");
            let token = variable("HF_TOKEN").or_else(|| Cache::new(cache.clone()).token());
            HubSettings { endpoint: endpoint.trim_end_matches('/').to_owned(), cache, token }
        });
        Environment {
            hub,
            log_filter: variable("RUST_LOG"),
            no_color: variable("NO_COLOR").is_some() || variable("TERM").is_some_and(|term| term == "dumb"),
            cache: user_cache.unwrap_or_else(std::env::temp_dir).join("tokenrouter"),
            api_keys: variable("TOKENROUTER_API_KEYS").map(Secret),
            admin_key: variable("TOKENROUTER_ADMIN_KEY").map(Secret),
            openai_api_key: variable("OPENAI_API_KEY").map(Secret),
            telemetry: Settings::read(variable),
            faults: variable("TOKENROUTER_FAULTS").is_some_and(|value| value == "1"),
            catalog: Catalog::default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_and_their_defaults() {
        let bare = Environment::of(|_| None, Some(PathBuf::from("h")));
        let hub = bare.hub.expect("a home folder is enough");
        assert_eq!((hub.endpoint.as_str(), hub.cache), (HUB, PathBuf::from("h/.cache/huggingface/hub")));
        assert_eq!((bare.no_color, bare.faults, bare.log_filter), (false, false, None));
        assert_eq!(bare.cache, PathBuf::from("h/.cache/tokenrouter"));
        let set = Environment::of(
            |name| match name {
                "HF_HOME" => Some("models".to_owned()),
                "HF_ENDPOINT" => Some("http://mirror/".to_owned()),
                "HF_TOKEN" => Some("secret".to_owned()),
                "NO_COLOR" | "TOKENROUTER_FAULTS" => Some("1".to_owned()),
                "TOKENROUTER_API_KEYS" => Some("first-key,second-key".to_owned()),
                _ => Some(String::new()),
            },
            None,
        );
        let hub = set.hub.expect("HF_HOME is set");
        assert_eq!((hub.endpoint.as_str(), hub.token.as_deref()), ("http://mirror", Some("secret")));
        assert_eq!(hub.cache, PathBuf::from("models/hub"));
        assert!(set.no_color && set.faults);
        assert_eq!(set.api_keys.as_ref().map(Secret::reveal), Some("first-key,second-key"));
        assert_eq!(format!("{:?} {:?}", set.api_keys, set.admin_key), "Some(Secret) None");
        let nowhere = Environment::of(|_| None, None).hub.expect_err("no folder at all");
        assert!(nowhere.contains("HF_HOME"), "{nowhere}");
    }
}
