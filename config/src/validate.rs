//! What must hold between the values of a launch file. Pure. Invariant: the first violation in file order is reported,
//! with what would be right.

use crate::error::ConfigError;
use crate::launch::{Execution, KvBudget, LaunchFile, Model, Policy};
use crate::nearest::hint;
use crate::quantity::Bytes;
use crate::schema;

/// Models a router can name.
const MODELS_MAX: usize = 64;

/// Checks the file and puts its models into the router's order.
pub(crate) fn validate(mut file: LaunchFile) -> Result<LaunchFile, ConfigError> {
    server(&file)?;
    for index in 0..file.models.len() {
        model(&file, index)?;
    }
    if let Some(cuda) = &file.cuda {
        within(&file, "cuda.memory_percent", u64::from(cuda.memory_percent))?;
    }
    let order = router(&file)?;
    batching(&file)?;
    let mut models: Vec<Option<Model>> = std::mem::take(&mut file.models).into_iter().map(Some).collect();
    file.models = order.into_iter().filter_map(|index| models[index].take()).collect();
    Ok(file)
}

fn server(file: &LaunchFile) -> Result<(), ConfigError> {
    let server = &file.server;
    if server.host.trim().is_empty() {
        return Err(file.error_at("server.host", "server.host is empty; give an address such as \"127.0.0.1\""));
    }
    within(file, "server.live_max", u64::from(server.live_max))?;
    within(file, "server.body_bytes_max", server.body_bytes_max.0)?;
    within(file, "server.request_timeout_ms", server.request_timeout_ms)?;
    within(file, "server.queue_timeout_ms", server.queue_timeout_ms)?;
    within(file, "server.client_timeout_ms", server.client_timeout_ms)?;
    within(file, "server.stall_ms", server.stall_ms)?;
    if server.step_timeout_ms > 0 {
        within(file, "server.step_timeout_ms", server.step_timeout_ms)?;
    }
    let (whole, first) = (server.request_timeout_ms, server.queue_timeout_ms);
    if whole > 0 && first > whole {
        let message = format!(
            "server.queue_timeout_ms = {first} is longer than server.request_timeout_ms = {whole}; lower it, or write 0"
        );
        return Err(file.error_at("server.queue_timeout_ms", message));
    }
    Ok(())
}

/// A value within the range that the table of keys has for it.
fn within(file: &LaunchFile, key: &str, value: u64) -> Result<(), ConfigError> {
    between(file, key, value, schema::range(key).unwrap_or((0, u64::MAX)))
}

fn between(file: &LaunchFile, key: &str, value: u64, (low, high): (u64, u64)) -> Result<(), ConfigError> {
    if (low..=high).contains(&value) {
        return Ok(());
    }
    Err(file.error_at(key, format!("{key} = {value} is out of range; give {low} to {high}")))
}

fn name_fault(name: &str) -> Option<&'static str> {
    if name.is_empty() {
        Some("is empty")
    } else if name.chars().any(|c| c.is_whitespace() || c.is_control()) {
        Some("contains white space or control characters")
    } else if name.chars().count() > 128 {
        Some("is longer than 128 characters")
    } else {
        None
    }
}

fn model(file: &LaunchFile, index: usize) -> Result<(), ConfigError> {
    let model = &file.models[index];
    let key = |field: &str| format!("models[{index}].{field}");
    if let Some(fault) = name_fault(&model.name) {
        return Err(file
            .error_at(&key("name"), format!("the model name `{}` {fault}; use letters, digits and -_./", model.name)));
    }
    if let Some(first) = file.models[..index].iter().position(|other| other.name == model.name) {
        let message =
            format!("the name `{}` is already taken by models[{first}]; give every model its own", model.name);
        return Err(file.error_at(&key("name"), message));
    }
    if let Some(threads) = model.threads {
        within(file, &key("threads"), u64::from(threads))?;
    }
    cores(file, index)?;
    crate::cuda::validate(file, index)?;
    within(file, &key("rows_max"), u64::from(model.rows_max))?;
    let most = schema::range("models.step_tokens_max").map_or(u64::MAX, |(_, most)| most);
    between(file, &key("step_tokens_max"), u64::from(model.step_tokens_max), (u64::from(model.rows_max), most))?;
    if let Some(length) = model.context_length {
        within(file, &key("context_length"), u64::from(length))?;
    }
    // A page of KV memory: less than one holds no request.
    let page = schema::range("models.kv_tokens").map_or(1, |(least, _)| least);
    let fault = match model.kv {
        KvBudget::Tokens(tokens) if u64::from(tokens) < page => Some(("kv_tokens", tokens.to_string())),
        KvBudget::Memory(Bytes(0)) => Some(("kv_memory", "0".to_owned())),
        _ => None,
    };
    match fault {
        Some((field, value)) => Err(file.error_at(
            &key(field),
            format!("{} = {value} holds no request; give room for at least {page} tokens", key(field)),
        )),
        None => Ok(()),
    }
}

fn cores(file: &LaunchFile, index: usize) -> Result<(), ConfigError> {
    let Some(cores) = &file.models[index].cores else { return Ok(()) };
    let key = format!("models[{index}].cores");
    let error = |message: String| Err(file.error_at(&key, message));
    if cores.is_empty() {
        return error(format!("{key} is empty; list core numbers such as [0, 1] or leave it out"));
    }
    if let Some(twice) = cores.iter().enumerate().find(|(at, core)| cores[..*at].contains(core)) {
        return error(format!("{key} names core {} twice; one worker thread a core", twice.1));
    }
    match file.models[index].threads {
        Some(threads) if threads as usize > cores.len() => {
            error(format!("{key} lists {} cores for {threads} threads; list as many cores as threads", cores.len()))
        }
        _ => Ok(()),
    }
}

/// Checks `[router]` and returns the indices of its models in its order.
fn router(file: &LaunchFile) -> Result<Vec<usize>, ConfigError> {
    let router = &file.router;
    if let Some(fault) = name_fault(&router.name) {
        let message = format!("the routed name `{}` {fault}; use letters, digits and -_./", router.name);
        return Err(file.error_at("router.name", message));
    }
    if file.models.iter().any(|model| model.name == router.name) {
        let message =
            format!("router.name = \"{}\" is also a model's name; clients could not tell them apart", router.name);
        return Err(file.error_at("router.name", message));
    }
    let names: Vec<&str> = file.models.iter().map(|model| model.name.as_str()).collect();
    let mut order = Vec::new();
    for wanted in &router.models {
        let Some(index) = names.iter().position(|name| name == wanted) else {
            let message = format!("router.models names the unknown model `{wanted}`; {}", hint(wanted, &names));
            return Err(file.error_at("router.models", message));
        };
        if order.contains(&index) {
            return Err(file.error_at("router.models", format!("router.models names `{wanted}` twice; name it once")));
        }
        order.push(index);
    }
    if let Some(left_out) = (0..names.len()).find(|index| !order.contains(index)) {
        let name = names[left_out];
        let message = format!("the model `{name}` is not in router.models; add it there or remove its table");
        return Err(file.error_at(&format!("models[{left_out}].name"), message));
    }
    if order.len() > MODELS_MAX {
        let message = format!("{} models are more than {MODELS_MAX}; remove some", order.len());
        return Err(file.error_at("models", message));
    }
    Ok(order)
}

fn batching(file: &LaunchFile) -> Result<(), ConfigError> {
    let batching = &file.batching;
    within(file, "batching.max_wait_ms", batching.max_wait_ms)?;
    let (stall, wait) = (file.server.stall_ms, batching.max_wait_ms);
    if stall <= wait {
        let message = format!(
            "server.stall_ms = {stall} would call a batch stuck that may wait {wait} ms (batching.max_wait_ms); raise it above that"
        );
        return Err(file.error_at("server.stall_ms", message));
    }
    if batching.policy != Policy::Fixed && !batching.thresholds.is_empty() {
        let policy = batching.policy.name();
        let message =
            format!("thresholds have no meaning under policy = \"{policy}\"; write policy = \"fixed\" or remove them");
        return Err(file.error_at("batching.thresholds", message));
    }
    if batching.prefill_ahead && matches!(batching.execution, Execution::ModelSync | Execution::StepSync) {
        let message = "prefill_ahead needs models that step when they may; write execution = \"async\" or remove it";
        return Err(file.error_at("batching.prefill_ahead", message));
    }
    let planned = matches!(batching.policy, Policy::Optimal | Policy::Adaptive);
    if batching.policy == Policy::Optimal && batching.profile.is_none() {
        let message =
            "policy = \"optimal\" needs a profile; measure one with `tokenrouter profile`, or write \"adaptive\"";
        return Err(file.error_at("batching.policy", message));
    }
    if !planned && batching.profile.is_some() {
        let policy = batching.policy.name();
        let message = format!(
            "a profile has no meaning under policy = \"{policy}\"; write policy = \"optimal\" or \"adaptive\", or remove it"
        );
        return Err(file.error_at("batching.profile", message));
    }
    let mut held = 0;
    for model in &file.models {
        let threshold = batching.thresholds.get(&model.name).copied().unwrap_or(1);
        let key = format!("batching.thresholds.{}", model.name);
        between(file, &key, u64::from(threshold), (1, u64::from(model.rows_max)))?;
        held += u64::from(threshold) - 1;
    }
    if held >= u64::from(file.server.live_max) {
        let live = file.server.live_max;
        let message = format!(
            "the thresholds can hold back {held} requests but server.live_max is {live}; lower them, or raise live_max above {held}"
        );
        return Err(file.error_at("batching.thresholds", message));
    }
    Ok(())
}
