//! What the engine says of itself, as Prometheus series. Owner: the engine's snapshot; nothing is counted here. Invariant:
//! every series of a model carries `model_name`; names are vLLM's where the meaning is equal.

use super::exposition::{Cumulative, Text};
use std::time::{SystemTime, UNIX_EPOCH};
use tokenrouter_actors::board::{BatcherSnapshot, PlannerSnapshot};
use tokenrouter_actors::runtime::{ModelSnapshot, RuntimeSnapshot};
use tokenrouter_core::executor::PAGE_TOKENS;
use tokenrouter_core::kv::LOSS_BUCKETS;

/// One number of a model: name, help, value.
type Series = (&'static str, &'static str, fn(&ModelSnapshot) -> f64);

const GAUGES: &[Series] = &[
    ("vllm:num_requests_running", "Requests in the step in flight.", |m| f64::from(m.decode.running)),
    ("vllm:num_requests_waiting", "Requests that wait for a batch or for memory.", |m| {
        f64::from(m.batcher.waiting + m.batcher.stalled)
    }),
    ("vllm:kv_cache_usage_perc", "Share of KV pages held by requests (1 = all).", kv_usage),
    ("tokenrouter:pending_requests", "Requests whose KV is kept here while a peer has control.", |m| {
        f64::from(m.inter_model.pending)
    }),
    ("tokenrouter:batch_threshold", "Requests a batch waits for.", |m| f64::from(m.batcher.threshold)),
    ("tokenrouter:open_streams", "Requests that entered here and have not ended.", |m| f64::from(m.client.live)),
    (
        "tokenrouter:executors",
        "Executors that hold memory; more than 1 while a step that was given up has not ended.",
        |m| f64::from(m.executors),
    ),
    ("tokenrouter:executor_lost", "1 while the executor is lost and not replaced.", |m| f64::from(m.decode.is_lost)),
    ("tokenrouter:kv_pages", "KV pages in all.", |m| f64::from(m.kv.pages_total)),
    ("tokenrouter:kv_pages_used", "KV pages held by requests.", |m| f64::from(kv_used(m))),
    ("tokenrouter:kv_pages_cached", "KV pages kept only for future prefix hits.", |m| f64::from(m.kv.pages_cached)),
];

const COUNTERS: &[Series] = &[
    ("vllm:num_preemptions_total", "Requests that lost their KV to an older one.", |m| m.kv.preemptions as f64),
    ("vllm:prefix_cache_queries_total", "Prompt tokens looked up in the prefix cache.", |m| {
        m.kv.prefix_query_tokens as f64
    }),
    ("vllm:prefix_cache_hits_total", "Prompt tokens found in the prefix cache.", |m| m.kv.prefix_hit_tokens as f64),
    ("tokenrouter:committed_tokens_total", "Tokens this model wrote.", |m| m.decode.committed as f64),
    ("tokenrouter:dropped_candidates_total", "Candidates the routing dropped.", |m| m.decode.dropped as f64),
    ("tokenrouter:steps_total", "Forward passes.", |m| m.decode.steps as f64),
    ("tokenrouter:steps_failed_total", "Forward passes that failed.", |m| m.decode.steps_failed as f64),
    ("tokenrouter:step_seconds_total", "Time of forward passes.", |m| m.decode.busy.as_secs_f64()),
    ("tokenrouter:batched_requests_total", "Requests released in batches.", |m| m.batcher.rows as f64),
    ("tokenrouter:kv_pages_allocated_total", "KV pages handed to requests.", |m| m.kv.pages_allocated as f64),
    ("tokenrouter:returns_total", "Requests that came back from a peer.", |m| m.inter_model.returned as f64),
    ("tokenrouter:catchup_tokens_total", "Tokens fed again when requests came back.", |m| {
        m.inter_model.catchup_tokens as f64
    }),
    ("tokenrouter:away_seconds_total", "Time requests were away at peers.", |m| m.inter_model.away.as_secs_f64()),
    ("tokenrouter:peer_frames_dropped_total", "Late, repeated or unknown messages of peers.", |m| {
        m.inter_model.dropped_frames as f64
    }),
    ("tokenrouter:peer_gaps_total", "Times messages of a peer were found missing.", |m| m.inter_model.gaps as f64),
    ("tokenrouter:executor_restarts_total", "Executors rebuilt.", |m| m.subserver.executor_restarts as f64),
    ("tokenrouter:actor_restarts_total", "Control actors rebuilt.", |m| m.subserver.children_restarts as f64),
];

fn kv_used(model: &ModelSnapshot) -> u32 {
    model.kv.pages_total.saturating_sub(model.kv.pages_free + model.kv.pages_cached)
}

fn kv_usage(model: &ModelSnapshot) -> f64 {
    f64::from(kv_used(model)) / f64::from(model.kv.pages_total.max(1))
}

/// One number of the Planner: name, type, help, value.
type Planned = (&'static str, &'static str, &'static str, fn(&PlannerSnapshot) -> f64);

/// Of all models together; 0 where thresholds do not follow the models.
const PLANNER: &[Planned] = &[
    ("tokenrouter:planner_looks_total", "counter", "Looks at what the models do.", |p| p.looks as f64),
    ("tokenrouter:planner_plans_total", "counter", "Tables of thresholds planned.", |p| p.planned as f64),
    ("tokenrouter:planner_adopted_total", "counter", "Tables of thresholds adopted.", |p| p.adopted as f64),
    ("tokenrouter:planner_failed_total", "counter", "Plans that failed.", |p| p.failed as f64),
    (
        "tokenrouter:planner_gain",
        "gauge",
        "Part by which the table compared last is faster than the one in force was then.",
        |p| p.gain,
    ),
];

/// All series of the engine.
pub fn render(out: &mut Text, snapshot: &RuntimeSnapshot) {
    let mut one = |name: &str, help: &str, value: f64| {
        out.family(name, "gauge", help);
        out.line(name, &[], value);
    };
    one("tokenrouter:ready", "1 while new requests are taken.", f64::from(snapshot.open));
    one("tokenrouter:live_requests", "Requests accepted and not ended.", f64::from(snapshot.live));
    one("tokenrouter:live_requests_max", "Requests accepted at once.", f64::from(snapshot.settings.live_max));
    one("tokenrouter:live_prompt_tokens", "Tokens of the prompts of live requests.", snapshot.prompt_tokens as f64);
    let planner = snapshot.planner.clone().unwrap_or_default();
    for (name, kind, help, value) in PLANNER {
        out.family(name, kind, help);
        out.line(name, &[], value(&planner));
    }
    for (kind, table) in [("gauge", GAUGES), ("counter", COUNTERS)] {
        for (name, help, value) in table {
            out.family(name, kind, help);
            for model in &snapshot.models {
                out.line(name, &[("model_name", &model.name)], value(model));
            }
        }
    }
    shares(out, &snapshot.models);
    losses(out, &snapshot.models);
    waiting(out, &snapshot.models);
    labelled(out, snapshot);
}

/// Which part of all tokens each model wrote.
fn shares(out: &mut Text, models: &[ModelSnapshot]) {
    let name = "tokenrouter:model_share";
    out.family(name, "gauge", "Part of all tokens so far that this model wrote (1 = all).");
    let all: u64 = models.iter().map(|model| model.decode.committed).sum();
    for model in models {
        let share = model.decode.committed as f64 / all.max(1) as f64;
        out.line(name, &[("model_name", &model.name)], share);
    }
}

/// How often requests that have ended lost their KV at each model: as cumulative buckets.
fn losses(out: &mut Text, models: &[ModelSnapshot]) {
    let name = "vllm:request_num_preemptions";
    out.family(name, "histogram", "Times an ended request lost its KV at the model to an older one.");
    for model in models {
        let (mut count, mut buckets) = (0, Vec::new());
        for (bound, more) in LOSS_BUCKETS.iter().zip(model.kv.ended_by_losses) {
            count += more;
            buckets.push((f64::from(*bound), count));
        }
        let counted =
            Cumulative { buckets, count: model.kv.ended_by_losses.iter().sum(), sum: model.kv.ended_losses as f64 };
        out.histogram(name, &[("model_name", &model.name)], &counted);
    }
}

/// Why requests wait, and what memory there is.
fn waiting(out: &mut Text, models: &[ModelSnapshot]) {
    let name = "vllm:num_requests_waiting_by_reason";
    out.family(name, "gauge", "Requests that wait for memory (capacity) or for others to fill a batch (deferred).");
    for model in models {
        for (reason, count) in [("capacity", model.batcher.stalled), ("deferred", model.batcher.waiting)] {
            out.line(name, &[("model_name", &model.name), ("reason", reason)], f64::from(count));
        }
    }
    let name = "vllm:cache_config_info";
    out.family(name, "gauge", "Always 1; the labels say how KV memory is laid out.");
    for model in models {
        let (block, blocks) = (PAGE_TOKENS.to_string(), model.kv.pages_total.to_string());
        let labels = [
            ("block_size", block.as_str()),
            ("enable_prefix_caching", "True"),
            ("model_name", &model.name),
            ("num_gpu_blocks", &blocks),
        ];
        out.line(name, &labels, 1.0);
    }
}

/// Series with a second label.
fn labelled(out: &mut Text, snapshot: &RuntimeSnapshot) {
    let models = &snapshot.models;
    let name = "tokenrouter:step_tokens_total";
    out.family(name, "counter", "Tokens consumed by forward passes (extend includes prefill).");
    for model in models {
        for (kind, count) in [("decode", model.decode.decode_tokens), ("extend", model.decode.extend_tokens)] {
            out.line(name, &[("model_name", &model.name), ("kind", kind)], count as f64);
        }
    }
    let name = "tokenrouter:batch_flush_total";
    out.family(name, "counter", "Batches released, by reason.");
    for model in models {
        for (reason, count) in BatcherSnapshot::REASONS.iter().zip(model.batcher.released) {
            out.line(name, &[("model_name", &model.name), ("reason", reason)], count as f64);
        }
    }
    let name = "vllm:admission_rejections_total";
    out.family(name, "counter", "Requests refused with 429, by what there was too much of.");
    for model in models {
        let [requests, tokens] = model.overloaded;
        for (reason, count) in [("max_num_queued_reqs", requests), ("max_num_queued_tokens", tokens)] {
            out.line(name, &[("model_name", &model.name), ("reason", reason)], count as f64);
        }
    }
    let name = "tokenrouter:hops_total";
    out.family(name, "counter", "Times control went from one model to another.");
    for (at, from) in models.iter().enumerate() {
        for (to, count) in
            models.iter().zip(&from.inter_model.hops).enumerate().filter(|(to, _)| *to != at).map(|(_, x)| x)
        {
            out.line(name, &[("from", &from.name), ("to", &to.name)], *count as f64);
        }
    }
    let name = "tokenrouter:engine_last_step_timestamp_seconds";
    out.family(name, "gauge", "Unix time at which the last forward pass ended; 0 before the first.");
    let unix = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64());
    for model in models {
        let ago = snapshot.now.since(model.decode.last_step).as_secs_f64();
        out.line(name, &[("model_name", &model.name)], if model.decode.steps == 0 { 0.0 } else { unix - ago });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokenrouter_core::ids::Time;

    fn two_models() -> RuntimeSnapshot {
        let mut small = ModelSnapshot { name: "sm\"all".to_owned(), ..ModelSnapshot::default() };
        (small.kv.pages_total, small.kv.pages_free, small.kv.pages_cached) = (10, 4, 1);
        small.inter_model.hops = vec![0, 7];
        small.batcher.released = [1, 2, 3, 4];
        small.overloaded = [6, 5];
        (small.kv.ended_by_losses, small.kv.ended_losses) = ([4, 3, 0, 0, 1, 2], 40);
        let mut large = ModelSnapshot { name: "large".to_owned(), ..ModelSnapshot::default() };
        (small.decode.committed, large.decode.committed) = (3, 9);
        (large.batcher.stalled, large.batcher.waiting) = (2, 5);
        RuntimeSnapshot {
            now: Time(5),
            live: 2,
            prompt_tokens: 70,
            open: true,
            models: vec![small, large],
            ..RuntimeSnapshot::default()
        }
    }

    #[test]
    fn every_family_is_declared_once_and_its_lines_follow_it() {
        let mut text = Text::default();
        render(&mut text, &two_models());
        let text = text.finish();
        let mut declared = Vec::new();
        for line in text.lines() {
            match line.strip_prefix("# TYPE ") {
                Some(family) => declared.push(family.split(' ').next().unwrap().to_owned()),
                None if line.starts_with('#') => {}
                None => {
                    let name = line.split(['{', ' ']).next().unwrap();
                    let family = declared.last().unwrap();
                    let part = name.strip_prefix(family.as_str()).expect("a line of the family declared last");
                    assert!(["", "_bucket", "_sum", "_count"].contains(&part), "{line}");
                }
            }
        }
        let families = declared.len();
        declared.sort();
        declared.dedup();
        assert_eq!(declared.len(), families);
    }

    #[test]
    fn numbers_come_from_the_snapshot() {
        let mut text = Text::default();
        render(&mut text, &two_models());
        let text = text.finish();
        let has = |line: &str| assert!(text.lines().any(|found| found == line), "{line} is missing in\n{text}");
        has("tokenrouter:live_requests 2");
        has("tokenrouter:planner_failed_total 0");
        has("tokenrouter:model_share{model_name=\"large\"} 0.75");
        has("vllm:num_requests_waiting_by_reason{engine=\"0\",model_name=\"large\",reason=\"capacity\"} 2");
        has("vllm:num_requests_waiting_by_reason{engine=\"0\",model_name=\"large\",reason=\"deferred\"} 5");
        has("vllm:num_requests_waiting{engine=\"0\",model_name=\"large\"} 7");
        has("tokenrouter:live_prompt_tokens 70");
        has("tokenrouter:kv_pages_used{model_name=\"sm\\\"all\"} 5");
        has("vllm:kv_cache_usage_perc{engine=\"0\",model_name=\"sm\\\"all\"} 0.5");
        has("tokenrouter:committed_tokens_total{model_name=\"large\"} 9");
        has("tokenrouter:hops_total{from=\"sm\\\"all\",to=\"large\"} 7");
        has("tokenrouter:batch_flush_total{model_name=\"sm\\\"all\",reason=\"timeout\"} 3");
        has(
            "vllm:admission_rejections_total{engine=\"0\",model_name=\"sm\\\"all\",reason=\"max_num_queued_tokens\"} 5",
        );
        has("vllm:request_num_preemptions_bucket{engine=\"0\",model_name=\"sm\\\"all\",le=\"1\"} 7");
        has("vllm:request_num_preemptions_bucket{engine=\"0\",model_name=\"sm\\\"all\",le=\"+Inf\"} 10");
        has("vllm:request_num_preemptions_sum{engine=\"0\",model_name=\"sm\\\"all\"} 40");
        has("vllm:request_num_preemptions_count{engine=\"0\",model_name=\"sm\\\"all\"} 10");
        has("tokenrouter:engine_last_step_timestamp_seconds{model_name=\"large\"} 0");
    }
}
