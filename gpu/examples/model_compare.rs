//! Compares a model with a logits fixture: `model_compare MODEL FIXTURE.json` prints, per prompt, how far this engine, llama.cpp
//! and the exact answer are apart over the fixture's top 20, and how many of 16 greedy tokens agree.

use serde_json::Value;
use std::path::Path;
use tokenrouter_core::executor::{Draw, Executor, Row, Step};
use tokenrouter_core::ids::{RequestId, TokenId};
use tokenrouter_gpu::load::{AnyRunner, KvMemory, LoadOptions, load};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [model, fixture] = &arguments[..] else {
        return Err("usage: model_compare MODEL FIXTURE.json".into());
    };
    let fixture: Value = serde_json::from_str(&std::fs::read_to_string(fixture)?)?;
    let options = LoadOptions { kv: KvMemory::Pages(64), context_len: Some(1024), ..LoadOptions::default() };
    let mut runner = load(Path::new(model), &options, &mut |_| ())?.executor()?;
    println!("prompt        ours-llama.cpp  ours-exact  llama.cpp-exact   greedy ids that agree with llama.cpp");
    for prompt in fixture["prompts"].as_array().ok_or("no prompts")? {
        let tokens = ids(&prompt["token_ids"]);
        let logits = logits(&mut runner, 0, &tokens)?;
        let far = |answer: &str| {
            let top = prompt[answer]["top"].as_array().into_iter().flatten();
            let off = top.map(|pair| (number(&pair[1]) - f64::from(logits[number(&pair[0]) as usize])).abs());
            off.fold(0.0, f64::max)
        };
        let greedy = ids(&prompt["llama_cpp"]["greedy_ids"]);
        let mut agreed = 0;
        let mut all = tokens.clone();
        for &id in &greedy {
            let start = if all.len() == tokens.len() { 0 } else { all.len() - 1 };
            let row = self::logits(&mut runner, start, &all[start..])?;
            agreed += usize::from(highest(&row) == id);
            all.push(id);
        }
        println!(
            "{:12} {:13.3} {:11.3} {:14.3} {:9} of {}",
            prompt["name"].as_str().unwrap_or("?"),
            far("llama_cpp"),
            far("numpy_f32"),
            number(&prompt["observed"]["llama_cpp_vs_numpy_f32"]["max_abs_top"]),
            agreed,
            greedy.len()
        );
    }
    Ok(())
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or(f64::NAN)
}

fn ids(value: &Value) -> Vec<TokenId> {
    value.as_array().into_iter().flatten().map(|id| number(id) as TokenId).collect()
}

fn highest(logits: &[f32]) -> TokenId {
    (0..logits.len()).rev().max_by(|&a, &b| logits[a].total_cmp(&logits[b])).unwrap_or(0) as TokenId
}

fn logits(runner: &mut AnyRunner, start: usize, tokens: &[TokenId]) -> Result<Vec<f32>, Box<dyn std::error::Error>> {
    let draw = Draw::default();
    let row = Row {
        request: RequestId(1),
        start: start as u32,
        tokens: tokens.to_vec(),
        pages: (0..64).collect(),
        draw: Some(draw),
        targets: None,
    };
    runner.step(&Step { rows: vec![row] })?;
    Ok(runner.last_logits(0).ok_or("no logits")?.to_vec())
}
