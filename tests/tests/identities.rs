//! What must not change an answer: routing thresholds at their ends, company in a batch, memory pressure, prefix hits,
//! hops. On the embedded demo pair through the whole runtime, and on runners driven by hand. Owner: runtime and gpu.
//! Invariant: comparisons are exact: tokens, models, entropies and log-probabilities bit for bit, those of the prompt too.

use serde_json::{Value, json};
use std::sync::{Arc, OnceLock};
use tokenrouter::text::ModelText;
use tokenrouter_actors::runtime::Runtime;
use tokenrouter_core::executor::PAGE_TOKENS;
use tokenrouter_core::ids::{ModelIdx, TokenId};
use tokenrouter_core::job::{FinishReason, Job, Prompt, StopRules, Target, TokenReport};
use tokenrouter_core::kv::pages_for;
use tokenrouter_core::routing;
use tokenrouter_core::sampling::SamplingParams;
use tokenrouter_core::text::{SpecialTokens, TextCodec};
use tokenrouter_gpu::load::{KvMemory, LoadOptions, LoadedModel};
use tokenrouter_tests::assets::SMOLLM2;
use tokenrouter_tests::conformance::{Answered, Setup, Walker, ask, ask_all, assert_idle, demo, load, open, serve};

const SMALL: ModelIdx = ModelIdx(0);
const LARGE: ModelIdx = ModelIdx(1);
/// A threshold at which the demo pair hops often.
const BUSY: f64 = 0.02;
const OUTPUT_TOKENS: u32 = 96;

/// Sizes a test chooses.
#[derive(Clone, Copy)]
struct Sizes {
    threads: usize,
    pages: u32,
    step_tokens: u32,
}

/// Room for everybody, and steps so small that most prompts are prefilled in chunks.
const ROOMY: Sizes = Sizes { threads: 1, pages: 256, step_tokens: 32 };

fn demo_model(name: &str, sizes: Sizes) -> Arc<LoadedModel> {
    let (threads, kv) = (sizes.threads, KvMemory::Pages(sizes.pages));
    let options =
        LoadOptions { threads, kv, rows_max: 16, step_tokens_max: sizes.step_tokens, ..LoadOptions::default() };
    Arc::new(load(&open(&demo(name)), options))
}

fn codec() -> Arc<dyn TextCodec> {
    static CODEC: OnceLock<Arc<dyn TextCodec>> = OnceLock::new();
    let read = || ModelText::load(&open(&demo("small"))).unwrap_or_else(|error| panic!("{error}")).tokenizer as _;
    CODEC.get_or_init(read).clone()
}

/// The pair under r_stitch.
fn pair(threshold: f64, sizes: Sizes) -> Setup {
    pair_under("r_stitch", &json!({ "threshold": threshold }), sizes)
}

/// The pair under any algorithm.
fn pair_under(algorithm: &str, params: &Value, sizes: Sizes) -> Setup {
    let algorithm = routing::build(algorithm, params, 2);
    Setup {
        models: vec![("small", demo_model("small", sizes)), ("large", demo_model("large", sizes))],
        codec: codec(),
        algorithm: algorithm.unwrap_or_else(|error| panic!("{error}")),
        thresholds: Vec::new(),
    }
}

/// Held-out problems of the demo, in its chat format.
fn problems(count: usize) -> Vec<String> {
    let file = demo("problems.jsonl");
    let lines = std::fs::read_to_string(&file).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
    let question = |line: &str| {
        let problem: serde_json::Value = serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}"));
        format!("Question: {}\nAnswer:", problem["question"].as_str().unwrap_or_default())
    };
    let found: Vec<String> = lines.lines().take(count).map(question).collect();
    assert_eq!(found.len(), count);
    found
}

fn job(text: &str, target: Target, sampling: SamplingParams) -> Job {
    let ids = codec().encode(text, SpecialTokens::AsText).unwrap_or_else(|error| panic!("{error}"));
    let stop = StopRules { max_tokens: Some(OUTPUT_TOKENS), ..StopRules::default() };
    Job {
        prompt: Prompt::Ids(ids),
        target,
        routing: None,
        sampling,
        stop,
        logprobs: Some(3),
        constraint: None,
        prompt_logprobs: None,
        entropy: true,
    }
}

/// Greedy for even numbers, sampled in a different way for each odd one.
fn sampling(number: usize) -> SamplingParams {
    let seed = 1000 + number as u64;
    match number % 8 {
        1 => SamplingParams { temperature: 1.0, seed, ..SamplingParams::default() },
        3 => SamplingParams { temperature: 0.8, top_p: 0.9, top_k: 20, seed, ..SamplingParams::default() },
        5 => SamplingParams {
            temperature: 1.3,
            repetition_penalty: 1.2,
            presence_penalty: 0.4,
            seed,
            ..SamplingParams::default()
        },
        7 => {
            SamplingParams { temperature: 0.9, min_p: 0.05, frequency_penalty: 0.3, seed, ..SamplingParams::default() }
        }
        _ => SamplingParams { seed, ..SamplingParams::default() },
    }
}

fn jobs(target: Target) -> Vec<Job> {
    problems(8).iter().enumerate().map(|(number, text)| job(text, target, sampling(number))).collect()
}

/// One after another, each in a runtime of its own.
fn each_alone(setup: &Setup, jobs: &[Job]) -> Vec<Answered> {
    let alone = |job: &Job| serve(setup, |runtime| async move { ask(&runtime, job.clone()).await });
    jobs.iter().map(alone).collect()
}

fn together(setup: &Setup, jobs: &[Job]) -> Vec<Answered> {
    serve(setup, |runtime| async move { ask_all(&runtime, jobs).await })
}

/// All but what is said of hops: the two ends of the threshold differ from a single model in the hop to it.
fn same_tokens(routed: &[Answered], alone: &[Answered], model: ModelIdx) {
    for (number, (routed, alone)) in routed.iter().zip(alone).enumerate() {
        assert!(!alone.tokens.is_empty(), "request {number}");
        assert!(routed.tokens.iter().all(|token| token.model == model), "request {number}: {:?}", routed.usage);
        let made: Vec<_> = routed.tokens.iter().map(|token| TokenReport { dropped: None, ..token.clone() }).collect();
        assert_eq!(made, alone.tokens, "request {number}");
        assert_eq!((&routed.text, &routed.reason), (&alone.text, &alone.reason), "request {number}");
    }
}

#[test]
fn r_stitch_at_one_is_the_small_model_alone() {
    for threshold in [1.0, 1.5] {
        let setup = pair(threshold, ROOMY);
        let (routed, alone) = (jobs(Target::Routed), jobs(Target::Only(SMALL)));
        let routed = together(&setup, &routed);
        same_tokens(&routed, &together(&setup, &alone), SMALL);
        assert!(routed.iter().all(|answer| answer.usage.hops == 0));
    }
}

#[test]
fn r_stitch_below_zero_is_the_large_model_alone() {
    let setup = pair(-0.5, ROOMY);
    let (routed, alone) = (jobs(Target::Routed), jobs(Target::Only(LARGE)));
    let routed = together(&setup, &routed);
    same_tokens(&routed, &together(&setup, &alone), LARGE);
    assert!(routed.iter().all(|answer| answer.usage.hops == 1), "the small model drops its first candidate");
}

/// The other algorithms that need no trained head; those that do are held to the same by simulated models.
#[test]
fn at_the_ends_of_every_scale_one_model_is_alone() {
    let ends = [
        ("always", json!({"model": 1}), LARGE),
        ("bernoulli", json!({"p": 0}), SMALL),
        ("bernoulli", json!({"p": 1}), LARGE),
        ("entropy", json!({"threshold": 23}), SMALL),
        ("entropy", json!({"threshold": 0}), LARGE),
        ("me", json!({"weights": [1, 0]}), SMALL),
        ("me", json!({"weights": [0, 1]}), LARGE),
    ];
    let alone = |model| together(&pair(1.0, ROOMY), &jobs(Target::Only(model)));
    let (small, large) = (alone(SMALL), alone(LARGE));
    for (algorithm, params, model) in ends {
        let routed = together(&pair_under(algorithm, &params, ROOMY), &jobs(Target::Routed));
        same_tokens(&routed, if model == SMALL { &small } else { &large }, model);
    }
}

fn assert_same(found: &[Answered], expected: &[Answered], how: &str) {
    for (number, (found, expected)) in found.iter().zip(expected).enumerate() {
        assert_eq!(found.without_cache(), expected.without_cache(), "request {number} {how}");
    }
}

fn with_prompts(mut jobs: Vec<Job>) -> Vec<Job> {
    jobs.iter_mut().for_each(|job| job.prompt_logprobs = Some(2));
    jobs
}

/// Batches, other numbers of threads, a KV pool that is too small for all, and prefix hits: the same eight answers.
#[test]
fn eight_requests_together_are_answered_as_each_alone() {
    let jobs = with_prompts(jobs(Target::Routed));
    let alone = each_alone(&pair(BUSY, ROOMY), &jobs);
    assert!(alone.iter().zip(&jobs).all(|(answer, job)| answer.prompt.len() as u32 == prompt_len(job)));
    let (hops, by_large): (u32, u32) = alone
        .iter()
        .fold((0, 0), |(hops, large), answer| (hops + answer.usage.hops, large + answer.usage.by_model[LARGE.index()]));
    let tokens: usize = alone.iter().map(|answer| answer.tokens.len()).sum();
    println!("{tokens} tokens, {by_large} by the large model, {hops} hops");
    assert!(hops >= 16 && by_large > 0, "too few hops to test anything: {hops}");

    for (thresholds, threads) in [(vec![], 1), (vec![], 2), (vec![4, 3], 2), (vec![8, 8], 1)] {
        let setup = Setup { thresholds, ..pair(BUSY, Sizes { threads, ..ROOMY }) };
        assert_same(&together(&setup, &jobs), &alone, &format!("with {threads} threads, B {:?}", setup.thresholds));
    }

    let longest = jobs.iter().map(|job| prompt_len(job) + OUTPUT_TOKENS).max().unwrap_or_default();
    let cramped = pair(BUSY, Sizes { pages: 2 * pages_for(longest), step_tokens: 32, ..ROOMY });
    let (found, preemptions) = serve(&cramped, |runtime| async move {
        let found = ask_all(&runtime, &jobs).await;
        let models = runtime.snapshot().models;
        (found, models.iter().map(|model| model.kv.preemptions).sum::<u64>())
    });
    assert_same(&found, &alone, "in a cramped pool");
    assert!(preemptions > 0, "nobody lost memory");
}

/// An ensemble draws models and tokens: both by the request's own seed, so neither company nor batching shows.
#[test]
fn an_ensemble_says_the_same_alone_and_among_eight() {
    let mut jobs = jobs(Target::Routed);
    for job in &mut jobs {
        job.sampling.temperature = job.sampling.temperature.max(0.7);
    }
    let setup = pair_under("me", &json!({"weights": [0.6, 0.4]}), ROOMY);
    let alone = each_alone(&setup, &jobs);
    let wrote = |model: ModelIdx| alone.iter().map(|answer| answer.usage.by_model[model.index()]).sum::<u32>();
    let share = f64::from(wrote(LARGE)) / f64::from(wrote(SMALL) + wrote(LARGE));
    assert!((share - 0.4).abs() < 0.1, "{share} of {}", wrote(SMALL) + wrote(LARGE));
    for thresholds in [vec![], vec![2, 3], vec![8, 8]] {
        let setup = Setup { thresholds, ..pair_under("me", &json!({"weights": [0.6, 0.4]}), ROOMY) };
        assert_same(&together(&setup, &jobs), &alone, &format!("with B {:?}", setup.thresholds));
    }
    let mut others = jobs;
    others.iter_mut().for_each(|job| job.sampling.seed += 1);
    let others = together(&setup, &others);
    assert!(others.iter().zip(&alone).filter(|(other, one)| other.tokens != one.tokens).count() >= 6, "seeds count");
}

fn prompt_len(job: &Job) -> u32 {
    if let Prompt::Ids(ids) = &job.prompt { ids.len() as u32 } else { 0 }
}

#[test]
fn prefix_hits_change_nothing() {
    let jobs = jobs(Target::Routed);
    let (first, second) =
        serve(
            &pair(BUSY, ROOMY),
            |runtime| async move { (ask_all(&runtime, &jobs).await, ask_all(&runtime, &jobs).await) },
        );
    assert_same(&second, &first, "the second time");
    assert!(second.iter().all(|answer| answer.usage.cached_tokens >= PAGE_TOKENS as u32));
}

/// The cache knows keys and values of prompts, not what they were thought to be worth: such a prompt is computed.
#[test]
fn prompts_with_log_probabilities_take_nothing_from_the_cache_and_leave_all_there() {
    let (plain, asking) = (jobs(Target::Routed), with_prompts(jobs(Target::Routed)));
    let fresh = together(&pair(BUSY, ROOMY), &asking);
    let (found, after) = serve(&pair(BUSY, ROOMY), |runtime| async move {
        ask_all(&runtime, &plain).await;
        (ask_all(&runtime, &asking).await, ask_all(&runtime, &plain).await)
    });
    assert_same(&found, &fresh, "with a cache full of prompts");
    assert!(found.iter().all(|answer| answer.usage.cached_tokens == 0));
    assert!(after.iter().all(|answer| answer.usage.cached_tokens >= PAGE_TOKENS as u32 && answer.prompt.is_empty()));
}

/// Against the logits of a model driven by hand, a token at a time, in `f64`.
#[test]
fn prompts_are_scored_by_the_model_where_the_request_enters() {
    for (target, model) in [(Target::Routed, "small"), (Target::Only(SMALL), "small"), (Target::Only(LARGE), "large")] {
        let jobs = with_prompts(jobs(target));
        let mut walker = Walker::new(&demo_model(model, ROOMY), 1);
        for (job, answer) in jobs.iter().zip(together(&pair(BUSY, ROOMY), &jobs)) {
            let Prompt::Ids(ids) = &job.prompt else { panic!("prompts are ids") };
            assert_eq!(answer.prompt.iter().map(|token| token.id).collect::<Vec<_>>(), *ids);
            assert_eq!(answer.prompt[0].logprobs, None);
            walker.forget(0);
            for (at, token) in answer.prompt.iter().enumerate().skip(1) {
                let logits = walker.feed(0, &ids[..at]).logits;
                let log_sum = logits.iter().map(|&logit| f64::from(logit).exp()).sum::<f64>().ln();
                let expected = f64::from(logits[token.id as usize]) - log_sum;
                let found = token.logprobs.as_ref().unwrap_or_else(|| panic!("none at {at}"));
                assert!((f64::from(found.chosen) - expected).abs() < 1e-4, "{at}: {} {expected}", found.chosen);
                let best =
                    (0..logits.len() as u32).rev().max_by(|&a, &b| logits[a as usize].total_cmp(&logits[b as usize]));
                assert_eq!((found.top.len(), Some(found.top[0].0)), (2, best), "{at}");
            }
        }
    }
}

/// Counters of the two models, in order.
fn counters(runtime: &Runtime) -> Vec<(u64, u64, u64)> {
    let count = |model: &tokenrouter_actors::runtime::ModelSnapshot| {
        let fed = model.decode.decode_tokens + model.decode.extend_tokens;
        (model.kv.pages_allocated, model.kv.prefix_queries, fed)
    };
    runtime.snapshot().models.iter().map(count).collect()
}

/// A request that hops keeps its KV where it was: each model looks it up once, takes pages once for each sixteen tokens,
/// and consumes every token once, however often the request comes and goes.
#[test]
fn pending_keeps_kv_across_hops() {
    let texts = problems(6);
    let hops = serve(&pair(BUSY, ROOMY), |runtime| async move {
        let mut hops = 0;
        for text in &texts {
            assert_idle(&runtime).await;
            let before = counters(&runtime);
            let job = job(text, Target::Routed, SamplingParams::default());
            let prompt = prompt_len(&job);
            let answer = ask(&runtime, job).await;
            assert_idle(&runtime).await;
            let len = prompt + answer.usage.completion_tokens;
            for (model, (before, after)) in before.iter().zip(counters(&runtime)).enumerate() {
                let visited = model == SMALL.index() || answer.usage.hops > 0;
                let (pages, queries, fed) = (after.0 - before.0, after.1 - before.1, after.2 - before.2);
                assert_eq!(queries, u64::from(visited), "model {model}, {} hops", answer.usage.hops);
                assert!(pages <= u64::from(pages_for(len)), "model {model}: {pages} pages for {len} tokens");
                assert!(fed < u64::from(len), "model {model} consumed {fed} tokens of {len}");
                assert!(!visited || fed >= 1, "model {model}");
            }
            hops += answer.usage.hops;
        }
        hops
    });
    assert!(hops >= 12, "only {hops} hops");
}

/// Two models write one sequence by a script; after every hop and every token the logits are those of a fresh prefill.
fn walk(models: [&LoadedModel; 2], prompt: &[TokenId], script: &[usize]) {
    let mut walkers = models.map(|model| Walker::new(model, 1));
    let mut fresh = models.map(|model| Walker::new(model, 1));
    let mut tokens = prompt.to_vec();
    for (turn, &count) in script.iter().enumerate() {
        let model = turn % 2;
        for token in 0..count {
            let lacks = tokens.len() - walkers[model].known(0);
            let found = walkers[model].feed(0, &tokens);
            // Every token after a hop, and now and then a later one: a prefill costs as much as all before it.
            if token == 0 || token % 5 == 4 {
                fresh[model].forget(0);
                let expected = fresh[model].feed(0, &tokens);
                assert_eq!(found.bits(), expected.bits(), "turn {turn}, token {token}: an extend by {lacks}");
                assert_eq!(found.drawn.token, expected.drawn.token, "turn {turn}, token {token}");
                assert_eq!(found.drawn.signals, expected.drawn.signals, "turn {turn}, token {token}");
                assert_eq!(found.drawn.logprobs, expected.drawn.logprobs, "turn {turn}, token {token}");
            }
            tokens.push(found.drawn.token);
        }
    }
}

#[test]
fn after_every_hop_the_logits_are_those_of_a_fresh_prefill() {
    let sized = |threads| Sizes { threads, step_tokens: 512, ..ROOMY };
    let (small, large) = (demo_model("small", sized(1)), demo_model("large", sized(2)));
    let script = [3, 2, 1, 7, 16, 1, 17, 4, 1, 1, 1, 1, 5, 20, 2, 33];
    for text in problems(4) {
        let prompt = codec().encode(&text, SpecialTokens::AsText).unwrap_or_else(|error| panic!("{error}"));
        walk([&small, &large], &prompt[..prompt.len().min(60)], &script);
    }
}

/// The same with quantised weights and int8 activations, where rounding could hide in the shape of a batch.
#[test]
fn after_every_hop_a_quantised_model_is_where_a_prefill_is() {
    let path = SMOLLM2.path().unwrap_or_else(|error| panic!("{error}"));
    let text = ModelText::load(&open(&path)).unwrap_or_else(|error| panic!("{error}"));
    let sized = |threads| LoadOptions {
        threads,
        kv: KvMemory::Pages(32),
        context_len: Some(512),
        step_tokens_max: 128,
        ..LoadOptions::default()
    };
    let (one, two) = (load(&open(&path), sized(1)), load(&open(&path), sized(2)));
    let prompt = text.tokenizer.encode("The capital of France is", SpecialTokens::AsText);
    walk([&one, &two], &prompt.unwrap_or_else(|error| panic!("{error}")), &[3, 2, 1, 6, 17, 1, 1, 4]);
}

/// End of text, length and stop tokens end a routed request in the same way whoever wrote the last token.
#[test]
fn requests_end_for_the_same_reason_together_and_alone() {
    let mut jobs = jobs(Target::Routed);
    for (number, job) in jobs.iter_mut().enumerate() {
        job.stop.max_tokens = Some([1, 2, 17, OUTPUT_TOKENS][number % 4]);
        job.stop.ignore_eos = number >= 4;
    }
    let setup = pair(BUSY, ROOMY);
    let alone = each_alone(&setup, &jobs);
    assert_same(&together(&setup, &jobs), &alone, "together");
    for (job, answer) in jobs.iter().zip(&alone) {
        let full = Some(answer.usage.completion_tokens) == job.stop.max_tokens;
        assert!(full || answer.reason == FinishReason::EndOfText, "{:?} after {:?}", answer.reason, answer.usage);
        assert!(!job.stop.ignore_eos || full, "{:?}", answer.usage);
    }
    assert!(alone.iter().any(|answer| answer.reason == FinishReason::EndOfText));
}
