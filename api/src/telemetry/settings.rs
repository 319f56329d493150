//! What OpenTelemetry's standard variables say. Owner: the environment. Invariant: what is set and cannot be done is an error
//! that names the variable, never ignored.

use std::fmt;

/// Where traces go when only the base address is given.
const TRACES: &str = "/v1/traces";

/// A collector and what it is told of this program.
#[derive(Clone, PartialEq, Eq)]
pub struct Settings {
    /// Where spans are posted.
    pub url: String,
    /// Headers to send; they may hold secrets.
    pub headers: Vec<(String, String)>,
    /// `service.name` and whatever else describes this program.
    pub resource: Vec<(String, String)>,
}

impl fmt::Debug for Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Settings").field("url", &self.url).finish_non_exhaustive()
    }
}

impl Settings {
    /// Reads the variables; `None` when no collector is named or tracing is switched off.
    ///
    /// # Errors
    /// The variable that is wrong and what would be right.
    pub fn read(variable: impl Fn(&str) -> Option<String>) -> Result<Option<Settings>, String> {
        let variable = |name: &str| variable(name).filter(|value| !value.trim().is_empty());
        let off = variable("OTEL_SDK_DISABLED").is_some_and(|value| value.eq_ignore_ascii_case("true"));
        match variable("OTEL_TRACES_EXPORTER").as_deref() {
            _ if off => return Ok(None),
            Some("none") => return Ok(None),
            None | Some("otlp") => {}
            Some(other) => return Err(format!("OTEL_TRACES_EXPORTER is {other:?}; traces go by otlp, or none")),
        }
        // The variable for traces alone comes before the one for everything.
        let either = |rest: &str| {
            let names = [format!("OTEL_EXPORTER_OTLP_TRACES_{rest}"), format!("OTEL_EXPORTER_OTLP_{rest}")];
            names.into_iter().find_map(|name| variable(&name).map(|value| (name, value)))
        };
        let (name, url) =
            match (variable("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"), variable("OTEL_EXPORTER_OTLP_ENDPOINT")) {
                (Some(url), _) => ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", url),
                (None, Some(base)) => {
                    ("OTEL_EXPORTER_OTLP_ENDPOINT", format!("{}{TRACES}", base.trim_end_matches('/')))
                }
                (None, None) => return Ok(None),
            };
        if !url.starts_with("http://") && !url.starts_with("https://") {
            return Err(format!("{name} must begin with http:// or https://, as in http://127.0.0.1:4318"));
        }
        if let Some((name, protocol)) = either("PROTOCOL").filter(|(_, protocol)| protocol != "http/protobuf") {
            return Err(format!(
                "{name} is {protocol:?}; traces go by http/protobuf only, to the port that the collector has for it (4318)"
            ));
        }
        let headers = match either("HEADERS") {
            Some((name, text)) => pairs(&name, &text)?,
            None => Vec::new(),
        };
        let mut resource = match variable("OTEL_RESOURCE_ATTRIBUTES") {
            Some(text) => pairs("OTEL_RESOURCE_ATTRIBUTES", &text)?,
            None => Vec::new(),
        };
        match variable("OTEL_SERVICE_NAME") {
            Some(service) => {
                resource.retain(|(key, _)| key != "service.name");
                resource.push(("service.name".to_owned(), service));
            }
            None if resource.iter().any(|(key, _)| key == "service.name") => {}
            None => resource.push(("service.name".to_owned(), "tokenrouter".to_owned())),
        }
        Ok(Some(Settings { url, headers, resource }))
    }
}

/// `key=value,key=value`, with percent signs before what is special.
fn pairs(name: &str, text: &str) -> Result<Vec<(String, String)>, String> {
    let wrong = || format!("{name} must be a list of key=value with commas between them, special characters as %XX");
    let pair = |part: &str| {
        let (key, value) = part.split_once('=').ok_or_else(wrong)?;
        let (key, value) = (plain(key.trim()).ok_or_else(wrong)?, plain(value.trim()).ok_or_else(wrong)?);
        if key.is_empty() || [&key, &value].iter().any(|text| text.chars().any(char::is_control)) {
            return Err(wrong());
        }
        Ok((key, value))
    };
    text.split(',').filter(|part| !part.trim().is_empty()).map(pair).collect()
}

/// Without percent signs; none when one of them is wrong.
fn plain(text: &str) -> Option<String> {
    let mut parts = text.split('%');
    let mut bytes = parts.next()?.as_bytes().to_owned();
    for part in parts {
        let (code, rest) = part.split_at_checked(2)?;
        bytes.push(u8::from_str_radix(code, 16).ok()?);
        bytes.extend_from_slice(rest.as_bytes());
    }
    String::from_utf8(bytes).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(variables: &[(&str, &str)]) -> Result<Option<Settings>, String> {
        let find = |name: &str| variables.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned());
        Settings::read(find)
    }

    #[test]
    fn nothing_is_sent_unless_a_collector_is_named() {
        const BASE: (&str, &str) = ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://c:4318/");
        assert_eq!(read(&[]), Ok(None));
        assert_eq!(read(&[BASE, ("OTEL_SDK_DISABLED", "TRUE")]), Ok(None));
        assert_eq!(read(&[BASE, ("OTEL_TRACES_EXPORTER", "none")]), Ok(None));
        let set = read(&[BASE, ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")]).unwrap().unwrap();
        assert_eq!(set.url, "http://c:4318/v1/traces");
        assert_eq!(set.resource, [("service.name".to_owned(), "tokenrouter".to_owned())]);
    }

    #[test]
    fn variables_for_traces_come_first_and_values_are_decoded() {
        let set = read(&[
            ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://c:4318"),
            ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "https://t/path"),
            ("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Basic%20YTpi%3D, x-scope = 1"),
            ("OTEL_SERVICE_NAME", "mine"),
            ("OTEL_RESOURCE_ATTRIBUTES", "service.name=other,deployment.environment.name=test"),
        ]);
        let set = set.unwrap().unwrap();
        let pair = |key: &str, value: &str| (key.to_owned(), value.to_owned());
        assert_eq!(set.url, "https://t/path");
        assert_eq!(set.headers, [pair("authorization", "Basic YTpi="), pair("x-scope", "1")]);
        assert_eq!(set.resource, [pair("deployment.environment.name", "test"), pair("service.name", "mine")]);
        assert!(!format!("{set:?}").contains("YTpi"), "headers are not shown");
    }

    #[test]
    fn what_cannot_be_done_is_refused_by_name() {
        const BASE: (&str, &str) = ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://c:4318");
        for (variables, name) in [
            (vec![("OTEL_EXPORTER_OTLP_ENDPOINT", "c:4317")], "OTEL_EXPORTER_OTLP_ENDPOINT"),
            (vec![BASE, ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")], "OTEL_EXPORTER_OTLP_PROTOCOL"),
            (vec![BASE, ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/json")], "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"),
            (vec![BASE, ("OTEL_TRACES_EXPORTER", "zipkin")], "OTEL_TRACES_EXPORTER"),
            (vec![BASE, ("OTEL_EXPORTER_OTLP_HEADERS", "no pair")], "OTEL_EXPORTER_OTLP_HEADERS"),
            (vec![BASE, ("OTEL_EXPORTER_OTLP_HEADERS", "a=%4")], "OTEL_EXPORTER_OTLP_HEADERS"),
            (vec![BASE, ("OTEL_EXPORTER_OTLP_HEADERS", "a=%0d%0ab: c")], "OTEL_EXPORTER_OTLP_HEADERS"),
            (vec![BASE, ("OTEL_RESOURCE_ATTRIBUTES", "=x")], "OTEL_RESOURCE_ATTRIBUTES"),
        ] {
            let error = read(&variables).unwrap_err();
            assert!(error.starts_with(name), "{variables:?}: {error}");
        }
    }
}
