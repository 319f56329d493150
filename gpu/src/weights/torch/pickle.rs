//! The pickle inside a torch checkpoint, read as data. Owner: the checkpoint reader. Invariant: nothing is executed: a
//! name from a module is a label, and only calls that build a tensor or an ordered dictionary are understood; every
//! other one is refused by its name.
//!
//! The stack machine follows the opcodes of CPython's `Lib/pickle.py`, those that protocols 2 to 5 emit for
//! dictionaries, lists, tuples, numbers and strings. Values live in one list and refer to each other by index, so shared
//! and self-containing values cost nothing and need no recursion.

use super::value::{Node, Pickle, StorageNode, StorageType, TensorNode};

/// Longest pickle, bytes, and most values in one.
pub const MAX_BYTES: usize = 16 << 20;
const MAX_NODES: usize = 1 << 20;
/// Most dimensions of a tensor.
const MAX_DIMS: usize = 8;

type Result<T> = std::result::Result<T, String>;

/// What is on the stack.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Item {
    Mark,
    Node(usize),
}

struct Machine<'a> {
    code: &'a [u8],
    at: usize,
    stack: Vec<Item>,
    memo: std::collections::HashMap<u32, usize>,
    nodes: Vec<Node>,
}

/// Reads a pickle.
///
/// # Errors
/// What is not understood or not allowed, with the byte where it stands.
pub fn read(code: &[u8]) -> Result<Pickle> {
    if code.len() > MAX_BYTES {
        return Err(format!("has {} bytes, more than the limit of {MAX_BYTES}", code.len()));
    }
    let mut machine = Machine { code, at: 0, stack: Vec::new(), memo: Default::default(), nodes: Vec::new() };
    loop {
        let start = machine.at;
        let opcode = machine.byte().map_err(|_| "ends without a stop; it is truncated".to_owned())?;
        if opcode == b'.' {
            let root = machine.pop().map_err(|reason| format!("byte {start}: {reason}"))?;
            return Ok(Pickle { nodes: machine.nodes, root });
        }
        machine.step(opcode).map_err(|reason| format!("byte {start}: {reason}"))?;
    }
}

impl Machine<'_> {
    fn step(&mut self, opcode: u8) -> Result<()> {
        match opcode {
            0x80 => self.protocol(),
            0x95 => self.take(8).map(|_| ()),
            b'(' => {
                self.stack.push(Item::Mark);
                self.bounded(self.stack.len())
            }
            b'N' => self.push(Node::None),
            0x88 => self.push(Node::Bool(true)),
            0x89 => self.push(Node::Bool(false)),
            b'J' | b'K' | b'M' | 0x8a => self.integer(opcode),
            b'G' => {
                let bits = u64::from_be_bytes(self.array()?);
                self.push(Node::Float(f64::from_bits(bits)))
            }
            b'X' | 0x8c | 0x8d => self.string(opcode),
            b')' => self.push(Node::Tuple(Vec::new())),
            b'}' => self.push(Node::Dict(Vec::new())),
            b']' => self.push(Node::List(Vec::new())),
            0x85..=0x87 => self.short_tuple(usize::from(opcode - 0x84)),
            b't' => {
                let items = self.marked()?;
                self.push(Node::Tuple(items))
            }
            b's' | b'u' => self.set_items(opcode),
            b'a' | b'e' => self.append(opcode),
            b'q' | b'r' | 0x94 => self.memoize(opcode),
            b'h' | b'j' => self.recall(opcode),
            b'c' | 0x93 => self.global(opcode),
            b'Q' => self.persistent(),
            b'R' => self.call(),
            b'b' => self.build(),
            0x81 | 0x92 => {
                Err("builds an object of a class; only tensors, dictionaries, lists and numbers are read".into())
            }
            other => Err(format!("opcode 0x{other:02x} is not allowed in a router checkpoint")),
        }
    }

    fn protocol(&mut self) -> Result<()> {
        match self.byte()? {
            2..=5 => Ok(()),
            other => Err(format!("protocol {other}; save with protocol 2")),
        }
    }

    fn integer(&mut self, opcode: u8) -> Result<()> {
        let value = match opcode {
            b'J' => i64::from(i32::from_le_bytes(self.array()?)),
            b'K' => i64::from(self.byte()?),
            b'M' => i64::from(u16::from_le_bytes(self.array()?)),
            _ => {
                let len = usize::from(self.byte()?);
                if len > 8 {
                    return Err(format!("an integer of {len} bytes"));
                }
                let bytes = self.take(len)?;
                let fill = if bytes.last().is_some_and(|byte| byte & 0x80 != 0) { 0xff } else { 0 };
                i64::from_le_bytes(std::array::from_fn(|index| bytes.get(index).copied().unwrap_or(fill)))
            }
        };
        self.push(Node::Int(value))
    }

    fn string(&mut self, opcode: u8) -> Result<()> {
        let len = match opcode {
            b'X' => u64::from(u32::from_le_bytes(self.array()?)),
            0x8c => u64::from(self.byte()?),
            _ => u64::from_le_bytes(self.array()?),
        };
        let len = usize::try_from(len).map_err(|_| "a string beyond any memory")?;
        let text = std::str::from_utf8(self.take(len)?).map_err(|_| "a string that is not UTF-8")?.to_owned();
        self.push(Node::Str(text))
    }

    fn short_tuple(&mut self, len: usize) -> Result<()> {
        let mut items = (0..len).map(|_| self.pop()).collect::<Result<Vec<_>>>()?;
        items.reverse();
        self.push(Node::Tuple(items))
    }

    fn set_items(&mut self, opcode: u8) -> Result<()> {
        let items = if opcode == b's' {
            let (value, key) = (self.pop()?, self.pop()?);
            vec![key, value]
        } else {
            self.marked()?
        };
        let target = self.top()?;
        let (pairs, []) = items.as_chunks::<2>() else {
            return Err("a dictionary key without a value".into());
        };
        match &mut self.nodes[target] {
            Node::Dict(entries) => entries.extend(pairs.iter().map(|[key, value]| (*key, *value))),
            other => return Err(format!("sets a key of {}", other.kind())),
        }
        Ok(())
    }

    fn append(&mut self, opcode: u8) -> Result<()> {
        let items = if opcode == b'a' { vec![self.pop()?] } else { self.marked()? };
        let target = self.top()?;
        match &mut self.nodes[target] {
            Node::List(list) => list.extend(items),
            other => return Err(format!("appends to {}", other.kind())),
        }
        Ok(())
    }

    fn memoize(&mut self, opcode: u8) -> Result<()> {
        let slot = match opcode {
            b'q' => u32::from(self.byte()?),
            b'r' => u32::from_le_bytes(self.array()?),
            _ => self.memo.len() as u32,
        };
        let node = self.top()?;
        self.memo.insert(slot, node);
        self.bounded(self.memo.len())
    }

    fn recall(&mut self, opcode: u8) -> Result<()> {
        let slot = if opcode == b'h' { u32::from(self.byte()?) } else { u32::from_le_bytes(self.array()?) };
        let node = *self.memo.get(&slot).ok_or_else(|| format!("recalls value {slot}, which was never stored"))?;
        self.stack.push(Item::Node(node));
        self.bounded(self.stack.len())
    }

    fn global(&mut self, opcode: u8) -> Result<()> {
        let name = if opcode == b'c' {
            let (module, name) = (self.line()?, self.line()?);
            format!("{module}.{name}")
        } else {
            let (name, module) = (self.pop()?, self.pop()?);
            match (&self.nodes[module], &self.nodes[name]) {
                (Node::Str(module), Node::Str(name)) => format!("{module}.{name}"),
                _ => return Err("a name that is not a string".into()),
            }
        };
        let node = match name.as_str() {
            "collections.OrderedDict" => Node::OrderedDictType,
            "torch._utils._rebuild_tensor_v2" => Node::RebuildTensor,
            other => match other.strip_prefix("torch.").and_then(StorageType::of_class) {
                Some(storage) => Node::StorageClass(storage),
                None => {
                    return Err(format!("names {name:?}, which a router checkpoint has no use for; it was not run"));
                }
            },
        };
        self.push(node)
    }

    /// `("storage", class, key, location, elements)`: bytes beside the pickle in the archive.
    fn persistent(&mut self) -> Result<()> {
        let id = self.pop()?;
        let Node::Tuple(parts) = &self.nodes[id] else {
            return Err("a persistent id that is not a tuple".into());
        };
        let &[kind, class, key, _location, elements] = &parts[..] else {
            return Err(format!("a persistent id of {} parts", parts.len()));
        };
        let node = match (&self.nodes[kind], &self.nodes[class], &self.nodes[key], &self.nodes[elements]) {
            (Node::Str(kind), Node::StorageClass(storage), Node::Str(_), Node::Int(elements)) if kind == "storage" => {
                let elements = u64::try_from(*elements).map_err(|_| "a storage of negative size")?;
                Node::Storage(StorageNode { key, storage: *storage, elements })
            }
            _ => return Err("a persistent id that is no storage".into()),
        };
        self.push(node)
    }

    fn call(&mut self) -> Result<()> {
        let (arguments, callee) = (self.pop()?, self.pop()?);
        let Node::Tuple(arguments) = &self.nodes[arguments] else {
            return Err("a call whose arguments are no tuple".into());
        };
        let node = match &self.nodes[callee] {
            Node::OrderedDictType if arguments.is_empty() => Node::Dict(Vec::new()),
            Node::OrderedDictType => return Err("an ordered dictionary made from arguments".into()),
            Node::RebuildTensor => Node::Tensor(self.tensor(arguments)?),
            other => return Err(format!("calls {}", other.kind())),
        };
        self.push(node)
    }

    /// `(storage, offset, size, stride, requires_grad, hooks, ...)`
    fn tensor(&self, arguments: &[usize]) -> Result<TensorNode> {
        let &[storage, offset, size, stride, ..] = arguments else {
            return Err(format!("a tensor of {} arguments", arguments.len()));
        };
        let (Node::Storage(_), Node::Int(offset)) = (&self.nodes[storage], &self.nodes[offset]) else {
            return Err("a tensor without a storage".into());
        };
        let offset = u64::try_from(*offset).map_err(|_| "a tensor at a negative offset")?;
        let (shape, strides) = (self.sizes(size)?, self.sizes(stride)?);
        if shape.len() != strides.len() || shape.len() > MAX_DIMS {
            return Err(format!("a tensor of {} dimensions with {} strides", shape.len(), strides.len()));
        }
        Ok(TensorNode { storage, offset, shape, strides })
    }

    fn sizes(&self, tuple: usize) -> Result<Vec<u64>> {
        let Node::Tuple(items) = &self.nodes[tuple] else {
            return Err("a shape that is not a tuple".into());
        };
        let size = |&item: &usize| match &self.nodes[item] {
            Node::Int(value) => u64::try_from(*value).map_err(|_| format!("a dimension of {value}")),
            other => Err(format!("a dimension that is {}", other.kind())),
        };
        items.iter().map(size).collect()
    }

    /// Attributes set on a dictionary (`_metadata` of a state dict) are dropped; nothing else has any.
    fn build(&mut self) -> Result<()> {
        let state = self.pop()?;
        let target = self.top()?;
        match (&self.nodes[target], &self.nodes[state]) {
            (Node::Dict(_), Node::Dict(_)) => Ok(()),
            (other, _) => Err(format!("sets the state of {}", other.kind())),
        }
    }

    fn push(&mut self, node: Node) -> Result<()> {
        self.nodes.push(node);
        self.stack.push(Item::Node(self.nodes.len() - 1));
        self.bounded(self.nodes.len())
    }

    fn pop(&mut self) -> Result<usize> {
        match self.stack.pop() {
            Some(Item::Node(node)) => Ok(node),
            _ => Err("takes a value that is not there".into()),
        }
    }

    fn top(&self) -> Result<usize> {
        match self.stack.last() {
            Some(Item::Node(node)) => Ok(*node),
            _ => Err("reads a value that is not there".into()),
        }
    }

    /// Everything above the last mark, which is removed with it.
    fn marked(&mut self) -> Result<Vec<usize>> {
        let mark = self.stack.iter().rposition(|item| *item == Item::Mark).ok_or("a mark is missing")?;
        let items = self.stack.split_off(mark + 1);
        self.stack.pop();
        Ok(items.into_iter().filter_map(|item| if let Item::Node(node) = item { Some(node) } else { None }).collect())
    }

    fn bounded(&self, count: usize) -> Result<()> {
        if count > MAX_NODES { Err(format!("more than {MAX_NODES} values")) } else { Ok(()) }
    }

    fn byte(&mut self) -> Result<u8> {
        self.take(1).map(|bytes| bytes[0])
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        let bytes = self.take(N)?;
        Ok(std::array::from_fn(|index| bytes[index]))
    }

    fn take(&mut self, len: usize) -> Result<&[u8]> {
        let left = self.code.len() - self.at;
        if len > left {
            return Err(format!("{len} more bytes are announced but {left} are left; it is truncated"));
        }
        self.at += len;
        Ok(&self.code[self.at - len..self.at])
    }

    /// Text up to the end of the line.
    fn line(&mut self) -> Result<String> {
        let rest = &self.code[self.at..];
        let len = rest.iter().position(|&byte| byte == b'\n').ok_or("a name without an end; it is truncated")?;
        let line = std::str::from_utf8(&rest[..len]).map_err(|_| "a name that is not UTF-8")?.to_owned();
        self.at += len + 1;
        Ok(line)
    }
}
