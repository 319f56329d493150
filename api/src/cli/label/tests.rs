//! Labelling with the demo pair, compared with one pass per position, each from an empty memory.

use super::*;
use crate::launch::Environment;
use crate::progress::Progress;
use clap::Parser;
use safetensors::SafeTensors;
use std::path::Path;

#[derive(Parser)]
struct Line {
    #[command(flatten)]
    args: Args,
}

fn demo(file: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../config/demo").join(file)
}

fn args(output: &Path, options: &str) -> Args {
    let mut line = vec!["label".to_owned(), demo("problems.jsonl").display().to_string()];
    line.extend(["--output".to_owned(), output.display().to_string()]);
    line.extend(options.split_whitespace().map(str::to_owned));
    Line::try_parse_from(line).unwrap_or_else(|error| panic!("{error}")).args
}

fn folder(name: &str) -> PathBuf {
    std::env::temp_dir().join(format!("tokenrouter-label-{name}-{}", std::process::id()))
}

fn context() -> Context {
    let line = ["tokenrouter", "--quiet", "--config", &demo("launch.toml").display().to_string(), "check"];
    let common = crate::cli::Cli::try_parse_from(line).unwrap_or_else(|error| panic!("{error}")).common;
    let interrupts = Default::default();
    Context { common, environment: Environment::read(), progress: Progress::hidden(), interrupts }
}

fn demo_pair() -> Loaded {
    let context = context();
    let file = launch::read(context.common.config.as_deref(), &Overrides::default(), &context.environment);
    load(&context, file.expect("the launch file")).expect("the demo pair")
}

/// The step after `tokens`, from an empty memory.
fn after(driver: &mut Driver, tokens: &[TokenId], needs: Needs) -> Drawn {
    let mut found = None;
    let done = driver.run(&[tokens.to_vec()], needs, |_, drawn| {
        found = Some(drawn);
        None
    });
    done.expect("a step");
    found.expect("a candidate")
}

/// Greedy continuation with a pass of its own for every token.
fn greedy(driver: &mut Driver, mut tokens: Vec<TokenId>, (eos, most): (&[TokenId], usize)) -> Vec<TokenId> {
    let from = tokens.len();
    while tokens.len() - from < most && !tokens[from..].last().is_some_and(|token| eos.contains(token)) {
        let next = after(driver, &tokens, Needs::default()).token;
        tokens.push(next);
    }
    tokens.split_off(from)
}

#[test]
fn labels_equal_one_pass_per_position() {
    let loaded = demo_pair();
    let args = args(&folder("unused"), "--limit 3 --top-k 20");
    let problems = questions(&args).expect("problems");
    let prompts = prompts(&loaded, &problems, false).expect("prompts");
    let pair = Pair::of(&loaded, &args).expect("two models");
    let judge = Exact(Check::Marked);
    let mut labeller = pair.labeller(&args, &judge).expect("a labeller");
    let rows = labeller.label(0, &problems, &prompts).expect("labels");
    let counts = rows.counts;
    assert!(counts.differing > counts.unknown && counts.divergent > 0, "{counts:?}");

    let (mut small, mut large) = (pair.driver(0).expect("small"), pair.driver(1).expect("large"));
    let (eos, needs) = (labeller.eos, labeller.needs);
    let mut row = 0;
    for (problem, prompt) in prompts.iter().enumerate() {
        let answer = greedy(&mut large, prompt.clone(), (eos, 200));
        let right = |tokens: &[TokenId]| judge.0.matches(&labeller.text(tokens), &problems[problem].answer);
        for position in 0..answer.len() {
            let seen = [&prompt[..], &answer[..position]].concat();
            let expected = after(&mut small, &seen, needs);
            let mut divergent = false;
            if expected.token != answer[position] {
                if !right(&answer) {
                    continue;
                }
                let mut other = answer[..position].to_vec();
                other.push(expected.token);
                other.extend(greedy(&mut large, [&seen[..], &[expected.token]].concat(), (eos, 200 - position)));
                divergent = !right(&other);
            }
            let wanted = [expected.token, answer[position], u32::from(divergent), problem as u32, position as u32];
            assert_eq!(rows.columns.each_ref().map(|column| column[row]), wanted);
            let close = |found: &[f32], expected: &[f32]| found.iter().zip(expected).all(|(a, b)| (a - b).abs() < 2e-2);
            let (width, top) = (expected.signals.hidden.len(), expected.signals.top.len());
            assert_eq!((width, top), (64, 20));
            assert!(close(&rows.hidden[row * width..][..width], &expected.signals.hidden), "row {row}");
            let logits: Vec<f32> = expected.signals.top.iter().map(|&(_, logit)| logit).collect();
            assert!(close(&rows.top[row * top..][..top], &logits), "row {row}");
            row += 1;
        }
    }
    assert_eq!(rows.counts.rows, row as u64);
}

#[test]
fn a_run_that_was_cut_short_goes_on() {
    let (whole, cut) = (folder("whole"), folder("cut"));
    let options = "--limit 5 --shard-problems 2 --judge equal --json";
    let context = context();
    for path in [&whole, &cut] {
        run(&context, &args(path, options)).expect("labelled");
    }
    let manifest = cut.join(shards::MANIFEST);
    let text = std::fs::read(&manifest).expect("the manifest");
    let mut shorter: shards::Manifest = serde_json::from_slice(&text).expect("JSON");
    assert_eq!(shorter.shards.len(), 3);
    shorter.shards.truncate(1);
    std::fs::write(&manifest, serde_json::to_vec(&shorter).expect("JSON")).expect("cut short");
    std::fs::write(cut.join("shard-00001.safetensors"), "half a shard").expect("damaged");
    run(&context, &args(&cut, options)).expect("continued");
    for name in [shards::MANIFEST, "shard-00000.safetensors", "shard-00001.safetensors", "shard-00002.safetensors"] {
        let read = |path: &Path| std::fs::read(path.join(name)).expect(name);
        assert!(read(&whole) == read(&cut), "{name}");
    }
    let bytes = std::fs::read(whole.join("shard-00002.safetensors")).expect("the last shard");
    let shard = SafeTensors::deserialize(&bytes).expect("safetensors");
    assert_eq!(shard.tensor("problem").expect("problem").data()[..4], [4, 0, 0, 0]);
    let other = run(&context, &args(&cut, "--limit 4 --judge equal")).expect_err("other settings").to_string();
    assert!(other.contains("new folder"), "{other}");
    for path in [whole, cut] {
        std::fs::remove_dir_all(path).expect("removed");
    }
}

#[test]
fn wrong_options_are_refused() {
    let out = folder("refused");
    for (options, part) in [
        ("--endpoint http://localhost:1/v1 --endpoint-model x", "--judge endpoint"),
        ("--small small --large small", "both small"),
        ("--large big", "known: small, large"),
    ] {
        let error = run(&context(), &args(&out, options)).expect_err(options).to_string();
        assert!(error.contains(part), "{error}");
    }
    let line = ["label", "p.jsonl", "--output", "out", "--judge", "endpoint"];
    assert!(Line::try_parse_from(line).is_err_and(|error| error.to_string().contains("--endpoint")));
    assert!(!out.exists());
}
