//! From TOML text to a [`LaunchFile`]. Owner: the caller of [`LaunchFile::load`]. Invariant: nothing is skipped.

use crate::cuda::{self, Device};
use crate::error::{ConfigError, Places, file_error};
use crate::faults::faults;
use crate::fields::{Document, Fields, FromToml, Problem, Value, join};
use crate::launch::{
    Batching, Execution, KvBudget, KvFormat, LaunchFile, LogFormat, Model, Policy, Router, Server, Tls,
};
use crate::quantity::Bytes;
use crate::schema;
use crate::source::Source;
use crate::validate::validate;
use serde_json::Value as Json;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use toml::de::{DeTable, DeValue};

/// Tables and lists in one another below `router.params`; TOML's own reader takes more only as dotted keys.
const NESTING_MAX: usize = 16;

impl LaunchFile {
    /// Reads and validates a launch file.
    ///
    /// # Errors
    /// [`ConfigError`], one line, for whatever the text alone can be wrong about.
    pub fn load(path: &Path) -> Result<LaunchFile, ConfigError> {
        let text = std::fs::read_to_string(path).map_err(|error| {
            file_error(path, format!("cannot read the launch file: {error}; check the path given to --config"))
        })?;
        LaunchFile::parse(&text, path)
    }

    /// Validates the text of a launch file; `path` names it in errors, and relative paths in it belong to its folder.
    ///
    /// # Errors
    /// As [`LaunchFile::load`].
    pub fn parse(text: &str, path: &Path) -> Result<LaunchFile, ConfigError> {
        let mut doc = Document { text, places: Places { path: path.to_owned(), by_key: BTreeMap::new() } };
        let root = DeTable::parse(text).map_err(|error| match error.span() {
            Some(span) => doc.error(span, error.message()),
            None => file_error(path, error.message()),
        })?;
        let span = root.span();
        let root = toml::Spanned::new(span, DeValue::Table(root.into_inner()));
        let top = Fields::open(&mut doc, ("the launch file", ""), &root, schema::TOP.names())?;
        let server = server(&mut doc, top.raw("server"), path.parent().unwrap_or(Path::new("")))?;
        let models = models(&mut doc, top.raw("models"), path.parent().unwrap_or(Path::new("")))?;
        let router = router(&mut doc, top.raw("router"), &models)?;
        let batching = batching(&mut doc, top.raw("batching"), (&models, path.parent().unwrap_or(Path::new(""))))?;
        let cuda = cuda::devices(&mut doc, top.raw("cuda"), &models)?;
        let faults = faults(&mut doc, top.raw("faults"), &models)?;
        validate(LaunchFile { server, router, batching, cuda, faults, models, places: doc.places })
    }
}

/// An empty table, for a section the file leaves out.
pub(crate) fn absent<'t>() -> Value<'t> {
    toml::Spanned::new(0..0, DeValue::Table(DeTable::new()))
}

fn server(doc: &mut Document<'_>, value: Option<&Value<'_>>, folder: &Path) -> Result<Server, ConfigError> {
    let none = absent();
    let fields = Fields::open(doc, ("[server]", "server"), value.unwrap_or(&none), schema::SERVER.names())?;
    let formats = [("human", LogFormat::Human), ("json", LogFormat::Json)];
    Ok(Server {
        host: fields.or(doc, "host", "127.0.0.1".to_owned())?,
        port: fields.or(doc, "port", 8080)?,
        live_max: fields.or(doc, "live_max", 64)?,
        prompt_tokens_max: fields.or(doc, "prompt_tokens_max", 0)?,
        body_bytes_max: fields.or(doc, "body_bytes_max", Bytes(8 << 20))?,
        request_timeout_ms: fields.or(doc, "request_timeout_ms", 3_600_000)?,
        queue_timeout_ms: fields.or(doc, "queue_timeout_ms", 0)?,
        client_timeout_ms: fields.or(doc, "client_timeout_ms", 60_000)?,
        stall_ms: fields.or(doc, "stall_ms", 60_000)?,
        step_timeout_ms: fields.or(doc, "step_timeout_ms", 300_000)?,
        drain_ms: fields.or(doc, "drain_ms", 30_000)?,
        api_keys_file: beside(doc, &fields, ("api_keys_file", folder))?,
        admin_key_file: beside(doc, &fields, ("admin_key_file", folder))?,
        insecure: fields.or(doc, "insecure", false)?,
        log_format: fields.choice(doc, "log_format", &formats)?.unwrap_or(LogFormat::Human),
        log_level: fields.or(doc, "log_level", "info".to_owned())?,
        tls: fields.raw("tls").map(|value| tls(doc, value, folder)).transpose()?,
    })
}

/// The file a key names, beside the launch file.
fn beside(
    doc: &Document<'_>,
    fields: &Fields<'_, '_>,
    (key, folder): (&str, &Path),
) -> Result<Option<PathBuf>, ConfigError> {
    Ok(fields.optional::<String>(doc, key)?.map(|path| folder.join(path)))
}

fn tls(doc: &mut Document<'_>, value: &Value<'_>, folder: &Path) -> Result<Tls, ConfigError> {
    let fields = Fields::open(doc, ("[server.tls]", "server.tls"), value, schema::TLS.names())?;
    let file = |key: &str, example: &str| fields.required::<String>(doc, key, example).map(|path| folder.join(path));
    Ok(Tls { cert: file("cert", "\"cert.pem\"")?, key: file("key", "\"key.pem\"")? })
}

fn models(doc: &mut Document<'_>, value: Option<&Value<'_>>, folder: &Path) -> Result<Vec<Model>, ConfigError> {
    let Some(value) = value else {
        return Err(file_error(
            &doc.places.path,
            "no model; add a [[models]] table with name = \"…\" and path = \"…\"",
        ));
    };
    let DeValue::Array(items) = value.get_ref() else {
        return Err(doc.error(value.span(), "models must be an array of tables; write [[models]], not [models]"));
    };
    doc.mark("models".to_owned(), &value.span());
    let models: Vec<Model> =
        items.iter().enumerate().map(|(index, item)| model(doc, (index, item), folder)).collect::<Result<_, _>>()?;
    if models.is_empty() {
        return Err(doc.error(value.span(), "models is empty; add a [[models]] table with a name and a path"));
    }
    Ok(models)
}

fn model(doc: &mut Document<'_>, (index, item): (usize, &Value<'_>), folder: &Path) -> Result<Model, ConfigError> {
    let path = format!("models[{index}]");
    let fields = Fields::open(doc, ("[[models]]", &path), item, schema::MODEL.names())?;
    let name: String = fields.required(doc, "name", "\"small\"")?;
    let place = fields.required::<String>(doc, "path", "\"FOLDER\", \"FILE.gguf\" or \"hf:owner/name\"")?;
    let source = Source::parse(&place, folder)
        .map_err(|problem| doc.places.error(&join(&path, "path"), format!("{path}.path {problem}")))?;
    let formats = [KvFormat::F16, KvFormat::Bf16, KvFormat::F32, KvFormat::Q8].map(|format| (format.name(), format));
    let device = fields.or(doc, "device", Device::Cpu)?;
    let (rows_max, step_tokens_max) = (fields.or(doc, "rows_max", 64)?, fields.or(doc, "step_tokens_max", 512)?);
    let model = Model {
        path: source,
        device,
        threads: fields.optional(doc, "threads")?,
        cores: fields.optional(doc, "cores")?,
        kv: kv_budget(doc, &fields)?,
        kv_format: fields.choice(doc, "kv_format", &formats)?.unwrap_or(KvFormat::F16),
        context_length: fields.optional(doc, "context_length")?,
        rows_max,
        step_tokens_max,
        cuda: cuda::model(doc, (&path, fields.raw("cuda")), (device, rows_max, step_tokens_max))?,
        name,
    };
    alias_places(&mut doc.places, &path, &model.name);
    Ok(model)
}

/// Makes the places of `models[2].…` known as `models.NAME.…` too, unless an earlier model took the name.
fn alias_places(places: &mut Places, path: &str, name: &str) {
    let alias = join("models", name);
    if places.by_key.contains_key(&alias) {
        return;
    }
    let found: Vec<_> = places
        .by_key
        .iter()
        .filter_map(|(key, place)| key.strip_prefix(path).map(|rest| (format!("{alias}{rest}"), *place)))
        .collect();
    places.by_key.extend(found);
}

fn kv_budget(doc: &Document<'_>, fields: &Fields<'_, '_>) -> Result<KvBudget, ConfigError> {
    let memory: Option<Bytes> = fields.optional(doc, "kv_memory")?;
    let tokens: Option<u32> = fields.optional(doc, "kv_tokens")?;
    match (memory, tokens) {
        (Some(_), Some(_)) => Err(doc
            .places
            .error(&join(&fields.path, "kv_tokens"), "kv_memory and kv_tokens are both given; keep one of them")),
        (Some(memory), None) => Ok(KvBudget::Memory(memory)),
        (None, Some(tokens)) => Ok(KvBudget::Tokens(tokens)),
        (None, None) => Ok(KvBudget::Default),
    }
}

fn router(doc: &mut Document<'_>, value: Option<&Value<'_>>, models: &[Model]) -> Result<Router, ConfigError> {
    let none = absent();
    if value.is_none() && models.len() > 1 {
        return Err(doc.places.error(
            "models[1]",
            format!(
                "{} models but no [router]; add [router] with algorithm = \"r_stitch\", or keep one model",
                models.len()
            ),
        ));
    }
    let fields = Fields::open(doc, ("[router]", "router"), value.unwrap_or(&none), schema::ROUTER.names())?;
    let algorithm = match fields.optional(doc, "algorithm")? {
        None if models.len() == 1 => "stay".to_owned(),
        None => fields.required(doc, "algorithm", "\"r_stitch\"")?,
        Some(name) => name,
    };
    Ok(Router {
        name: fields.or(doc, "name", "tokenrouter".to_owned())?,
        algorithm,
        models: fields.or(doc, "models", models.iter().map(|model| model.name.clone()).collect())?,
        params: params(doc, fields.raw("params"))?,
    })
}

fn params(doc: &mut Document<'_>, value: Option<&Value<'_>>) -> Result<serde_json::Map<String, Json>, ConfigError> {
    let Some(value) = value else { return Ok(serde_json::Map::new()) };
    match json(doc, "router.params", value)? {
        Json::Object(table) => Ok(table),
        _ => Err(doc.error(value.span(), "router.params must be a table; write [router.params] above the parameters")),
    }
}

/// A TOML value as JSON, the places of its keys recorded on the way.
fn json(doc: &mut Document<'_>, path: &str, value: &Value<'_>) -> Result<Json, ConfigError> {
    doc.mark(path.to_owned(), &value.span());
    if path.matches(['.', '[']).count() > NESTING_MAX {
        let message = format!("router.params is nested deeper than {NESTING_MAX} levels; write fewer");
        return Err(doc.error(value.span(), message));
    }
    let number = |text: &str| text.replace('_', "").parse::<f64>().ok().and_then(serde_json::Number::from_f64);
    let impossible = |doc: &Document<'_>| doc.error(value.span(), format!("{path} is not a number that can be used"));
    Ok(match value.get_ref() {
        DeValue::String(text) => Json::String(text.to_string()),
        DeValue::Boolean(flag) => Json::Bool(*flag),
        DeValue::Integer(whole) => {
            let whole = i64::from_str_radix(whole.as_str(), whole.radix()).map_err(|_| impossible(doc))?;
            Json::from(whole)
        }
        DeValue::Float(float) => Json::Number(number(float.as_str()).ok_or_else(|| impossible(doc))?),
        DeValue::Array(items) => {
            let items = items.iter().enumerate().map(|(index, item)| json(doc, &format!("{path}[{index}]"), item));
            Json::Array(items.collect::<Result<_, _>>()?)
        }
        DeValue::Table(table) => {
            let mut object = serde_json::Map::new();
            for (key, item) in table {
                object.insert(key.get_ref().to_string(), json(doc, &join(path, key.get_ref()), item)?);
            }
            Json::Object(object)
        }
        DeValue::Datetime(_) => return Err(doc.error(value.span(), format!("{path} is a date; no parameter is one"))),
    })
}

fn batching(
    doc: &mut Document<'_>,
    value: Option<&Value<'_>>,
    (models, folder): (&[Model], &Path),
) -> Result<Batching, ConfigError> {
    let none = absent();
    let fields = Fields::open(doc, ("[batching]", "batching"), value.unwrap_or(&none), schema::BATCHING.names())?;
    let policies = [
        ("eager", Policy::Eager),
        ("fixed", Policy::Fixed),
        ("optimal", Policy::Optimal),
        ("adaptive", Policy::Adaptive),
    ];
    let modes = [
        ("auto", Execution::Auto),
        ("async", Execution::Async),
        ("model_sync", Execution::ModelSync),
        ("step_sync", Execution::StepSync),
        ("std_serving", Execution::StdServing),
    ];
    let policy = fields.choice(doc, "policy", &policies)?.unwrap_or(Policy::Eager);
    let max_wait_ms = fields.or(doc, "max_wait_ms", 50)?;
    let mut thresholds = BTreeMap::new();
    if let Some(value) = fields.raw("thresholds") {
        let names: Vec<&str> = models.iter().map(|model| model.name.as_str()).collect();
        let table = Fields::open(doc, ("[batching.thresholds]", "batching.thresholds"), value, names.clone())?;
        for &name in &names {
            if let Some(threshold) = table.optional(doc, name)? {
                thresholds.insert(name.to_owned(), threshold);
            }
        }
    }
    let profile = fields.optional::<String>(doc, "profile")?.map(|path| folder.join(path));
    let execution = fields.choice(doc, "execution", &modes)?.unwrap_or(Execution::Auto);
    let prefill_ahead = fields.or(doc, "prefill_ahead", false)?;
    Ok(Batching { policy, thresholds, profile, max_wait_ms, execution, prefill_ahead })
}

impl FromToml for Bytes {
    fn from_toml(value: &DeValue<'_>) -> Result<Self, Problem> {
        match value {
            DeValue::String(text) => text.parse().map_err(|error| Problem::Value(format!("= {error}"))),
            DeValue::Integer(_) => u64::from_toml(value).map(Bytes),
            _ => Err(Problem::Type("an amount such as \"512 MiB\" or a number of bytes")),
        }
    }
}
