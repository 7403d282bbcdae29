"""Wrong solutions of the build-it tasks, as learners write them, and why each is refused."""

# Task, then for each the text of the solution (-), what replaces it (+), and a part of the message.
TEXT = r"""
attention
- triu(1)
+ triu(2)
? 5 tokens, 2 query heads, 2 KV heads: the attention of the tokens [0, 1, 2, 3] differs from torch's.
- h // group
+ h % k.shape[1]
? 1 tokens, 6 query heads, 2 KV heads: the attention of the tokens [0] differs from torch's.
-  / q.shape[2] ** 0.5
+
? 5 tokens, 2 query heads, 2 KV heads: the attention of the tokens [1, 2, 3, 4] differs from torch's.
- triu(1)
+ triu(1).T
? 5 tokens, 2 query heads, 2 KV heads: the attention of the tokens [
- triu(1)
+ triu(0)
? 1 tokens, 2 query heads, 2 KV heads: the attention of the tokens [0] differs from torch's.
- scores.masked_fill(future, -torch.inf).softmax(-1)
+ (e := scores.exp() * ~future) / e.sum(-1, keepdim=True)
? 5 tokens, 2 query heads, 2 KV heads, keys and queries times 20: the attention of the tokens [
- scores.masked_fill(future, -torch.inf).softmax(-1)
+ scores.softmax(-1).masked_fill(future, 0.0)
? 5 tokens, 2 query heads, 2 KV heads: the attention of the tokens [0, 1, 2, 3] differs from torch's.
-     group =
+     q /= q.shape[2] ** 0.5
+     q = q * q.shape[2] ** 0.5
+     group =
? `attention` changes q, which is the caller's.
- softmax(-1)
+ softmax(-2)
? the attention of the tokens [
delta
- kept = states * g.exp()[:, None, None]
+ kept = states
? The example: the states should begin with [5.68, 8.24], but they begin with
- g.exp()[:, None, None]
+ g[:, None, None]
? The example: the states should begin with [5.68, 8.24], but they begin with
- (v - torch.einsum("hkv,hk->hv", kept, k))
+ v
? The example: the states should begin with [5.68, 8.24], but they begin with [10.0, 14.0].
- "hkv,hk->hv", kept, k
+ "hkv,hk->hv", states, k
? The example: the states should begin with [5.68, 8.24], but they begin with [1.36, 2.48].
- beta[:, None] * (v - 
+ (beta[:, None] * v - 
? 1 heads of Dk=2 and Dv=1: the states should begin with [
- new, q)
+ kept, q)
? The example: the outputs should begin with [5.68], but they begin with [4.0].
- kept = states * g.exp()[:, None, None]
+ kept = states.mul_(g.exp()[:, None, None])
? The example: `step` changes states, which is the caller's.
- k[:, :, None] * d[:, None]
+ k[:, :, None] * d[:1, None]
? 2 heads of Dk=2 and Dv=1: the states should begin with [
- new, q)
+ new, q / q.norm(dim=-1, keepdim=True))
? 1 heads of Dk=2 and Dv=1: the outputs should begin with [
stop
- while self.held and not any(stop.startswith(self.held) for stop in self.stops):
+ while self.held:
? 'in ' should be shown by now, but it is 'in E'.
- shown, self.held = shown + self.held[0], self.held[1:]
+ shown, self.held = shown + self.held, ''
? 'a' should be shown by now, but it is 'aa'.
-         return self.held
+         return ''
? tokens [b'an E']: and no more follow: 'an E' should be shown in all, but with '' from `finish` it is 'an '.
- if self.ended:
+ if False:
? tokens [b'in E', b'N', b'g', b'l', b'ENDs']: 'in ENgl' should be shown by now, but it is 'in ENgls'.
- for stop in self.stops:
+ for stop in self.stops[::-1]:
? Stop strings ['ab', 'b'], tokens [b'ab']: '' should be shown by now, but it is 'a'.
- self.decoder.decode(token)
+ token.decode(errors='ignore')
? Stop strings [], tokens [b'\xe2', b'\x82\xac']: '€' should be shown by now, but it is ''.
- while self.held and not any(stop.startswith(self.held) for stop in self.stops)
+ while len(self.held) > 9 or self.held and not any(s.startswith(self.held) for s in self.stops)
? tokens [b'1', b'T', b'his is a long line of forty characters\n']: '1' should be shown by now
- self.held.endswith(stop)
+ self.held.lower().endswith(stop.lower())
? tokens [b'The end. ', b' ENd ']: 'The end.  ENd ' should be shown by now, but it is 'The end.  '.
- shown = ""
+ shown, self.held = ("", self.held) if token else (self.held, "")
? Stop strings ['END'], tokens [b'xE', b'']: 'x' should be shown by now, but it is 'xE'.
-         return self.held
+         return "" if self.decoder.getstate()[0] else self.held
? tokens [b'xE', b'\xe2']: and no more follow: 'xE' should be shown in all, but with '' from `finish` it is 'x'.
- self.stops, self.ended, self.held = stops, False, ""
+ self.stops, self.ended, self.held = stops, False, stops.sort(key=len, reverse=True) or ""
? The list of stop strings, which is the caller's, should be ['b', 'ab'], but with your code it is ['ab', 'b'].
-         return self.held
+         return self.held + self.decoder.getstate()[0].decode(errors='replace')
? [b'a', b'\xe2\x82']: and no more follow: 'a' should be shown in all, but with '�' from `finish` it is 'a�'.
- for stop in self.stops):
+ for stop in self.stops[:1]):
? Stop strings ['b', 'ab'], tokens [b'a']: '' should be shown by now, but it is 'a'.
- for character in self.decoder.decode(token)
+ for character in [self.decoder.decode(token)]
? tokens [b'in E', b'N', b'g', b'l', b'ENDs']: 'in ENgl' should be shown by now, but it is 'in ENglENDs'.
- self.
+ StopStream.
? Another stream has held back 'a'. What this one shows of 'b' should be 'b', but with your code it is ''.
- if self.held.endswith(stop):
+ if self.held.endswith(stop) and not any(s != stop and s.startswith(stop) for s in self.stops):
? Stop strings ['ab', 'abb'], tokens [b'ab']: `ended` should be True, but with your code it is False.
cache
- before + torch.arange
+ torch.arange
? 2 KV heads, tokens in pieces of [1, 1, 1, 1]: the attention of the tokens [1, 2, 3] differs from torch's.
- repeat_interleave(group, dim=1)
+ repeat(1, group, 1)
? 6 query heads, 2 KV heads, tokens in pieces of [5]: the attention of the tokens [0, 1, 2, 3, 4] differs from torch's.
-  / q.shape[2] ** 0.5
+
? 6 query heads, 6 KV heads, tokens in pieces of [5]: the attention of the tokens [1, 2, 3, 4] differs from torch's.
- q.shape[2] ** 0.5
+ q.shape[2]
? 6 query heads, 6 KV heads, tokens in pieces of [5]: the attention of the tokens [1, 2, 3, 4] differs from torch's.
- self.k, self.v = torch.cat((self.k, k)), torch.cat((self.v, v))
+ self.k, self.v = k, v
? 2 KV heads, tokens in pieces of [1, 1, 1, 1]: the attention of the tokens [1, 2, 3] differs from torch's.
- torch.cat((self.k, k)), torch.cat((self.v, v))
+ torch.cat((k, self.k)), torch.cat((v, self.v))
? 2 query heads, 2 KV heads, tokens in pieces of [3, 2]: the attention of the tokens [3] differs from torch's.
- self.
+ KVCache.
? Another cache holds 3 tokens, this one none: the attention of the tokens [0, 1, 2, 3] differs from torch's.
- scores.masked_fill(~seen, -torch.inf).softmax(-1)
+ (e := scores.exp() * seen) / e.sum(-1, keepdim=True)
? of [3, 2], keys and queries times 20: the attention of the tokens [0, 1, 2, 3, 4] differs from torch's.
- <= before + torch.arange(len(q))[:, None]
+ <= (last := before + torch.arange(len(q))[:, None])
+         seen &= torch.arange(len(keys)) > last - 1024
? pieces of [50, 1, 1100, 1]: the attention of the tokens [1024, 1025, 1026, 1027, 1028, 1029, 1030, 1031] and more
- torch.cat((self.k, k)), torch.cat((self.v, v))
+ (torch.cat((self.k, k)), torch.cat((self.v, v))) if before else (k, v)
? overwritten q, k and v of the tokens 0, 1 to 2, 3 to 4 after each call: the attention of the tokens [1, 2, 3, 4] differs
- q, keys) / q.shape[2] ** 0.5
+ q.div_(q.shape[2] ** 0.5), keys)
? `attend` changes q, which is the caller's.
- return torch.einsum("hnl
+ if len(keys) == 1: return v if group == 1 else values
+         return torch.einsum("hnl
? overwritten q, k and v of the tokens 0, 1 to 2, 3 to 4 after each call: the attention of the tokens [0] differs
slots
- * block_size + position % block_size
+ + position % block_size
? 2], 4 positions from 2 on: the list of slots should be [30, 31, 8, 9], but with your code it is [9, 10, 2, 3].
- -(-(start + count) // block_size)
+ (start + count) // block_size
? [7, 2], 3 positions from 6 on: the number of blocks to append should be 1, but with your code it is 0.
- max(0, needed - len(block_table))
+ needed - len(block_table)
? [7, 2, 1], 4 positions from 0 on: the number of blocks to append should be 0, but with your code it is -2.
- (start + count)
+ count
? [7, 2], 3 positions from 6 on: the number of blocks to append should be 1, but with your code it is 0.
- block_table[position // block_size] * block_size
+ block_table[start // block_size + (position - start) // block_size] * block_size
? 2], 4 positions from 2 on: the list of slots should be [30, 31, 8, 9], but with your code it is [30, 31, 28, 29].
- max(0, needed - len(block_table))
+ len({p // block_size for p in range(len(block_table) * block_size, start + count) if p >= start})
? [7, 2], 1 positions from 12 on: the number of blocks to append should be 2, but with your code it is 1.
- max(0, needed
+ max(0.0, needed
? [7, 2], 4 positions from 2 on: the number of blocks to append should be 0, but with your code it is 0.0.
- def slots
+ @lambda f, out=[]: lambda *given: out.__setitem__(slice(None), f(*given)) or out
+ def slots
? the list of slots, after another call, should be [30, 31, 8, 9], but with your code it is [4, 5, 6].
- def slots
+ kept = {}
+ @lambda f: lambda table, *rest: kept.setdefault((*table, *rest), f(table, *rest))
+ def slots
? the list of a second call should be [30, 31, 8, 9], but with your code it is [30, 31, 8, 9, 99].
step
- tokens = min(len(seq.token_ids) - seq.num_computed, budget)
-         if
+ tokens = min(1 if seq.decoding else len(seq.token_ids) - seq.num_computed, budget)
+         if
? tokens to compute, waiting ones [1]. The plan should be [1, 1, 1], but with your code it is [1, 1, 1, 1].
- if tokens > 0:
+ if True:
? tokens to compute, waiting ones [1]. The plan should be [1, 1, 1], but with your code it is [1, 0, 1, 1].
- len(running) < max_num_seqs
+ True
? to compute, waiting ones [4, 5, 2]. The plan should be [1, 1, 4], but with your code it is [1, 1, 4, 2].
- plan.append((seq, tokens))
-             budget -= tokens
+ plan.append((seq, tokens))
? to compute, waiting ones [4, 5, 2]. The plan should be [1, 1, 4, 2], but with your code it is [1, 1, 4, 4].
- waiting.pop(0)
+ waiting.pop()
? to compute, waiting ones [4, 5, 2]. The plan should be [1, 1, 4], but with your code it is [1, 1, 2].
- while waiting and budget > 0
+ while waiting and budget >= len(waiting[0].token_ids) - waiting[0].num_computed
? to compute, waiting ones [4, 5, 2]. The plan should be [1, 1, 4, 2], but with your code it is [1, 1, 4].
- tokens = min(len(seq.token_ids) - seq.num_computed, budget)
-         if
+ tokens = len(seq.token_ids) - seq.num_computed
+         if
? have [12] tokens to compute, waiting ones [3]. The plan should be [8], but with your code it is [12].
- tokens = min(len(seq.token_ids) - seq.num_computed, budget)
-         if
+ tokens = min(1 if seq.num_output else len(seq.token_ids) - seq.num_computed, budget)
+         if
? and 0 are computed. With a budget of 30, the plan should be [15], but with your code it is [1].
- tokens = min(len(seq.token_ids) - seq.num_computed, budget)
-         plan
+ tokens = min(len(seq.token_ids) - (0 if seq.num_output else seq.num_computed), budget)
+         plan
? and 8 are computed. With a budget of 30, the plan should be [7], but with your code it is [15].
- return plan
+ return [*{seq.request_id: (seq, n) for seq, n in plan}.values()]
? Two samples of one request run, with 3 tokens to compute each. The plan should be [3, 3], but with your code it is [3].
- while waiting and
+ waiting.sort(key=lambda seq: not seq.num_output)
+     while waiting and
? of which 0 are computed. The plan should be [3, 15], but with your code it is [15, 3].
- len(running) < max_num_seqs
+ len(plan) < max_num_seqs
? 0, 1] tokens to compute, waiting ones [1]. The plan should be [1, 1], but with your code it is [1, 1, 1].
- running.append(seq)
-         tokens = min(len(seq.token_ids)
+ running.append(seq)
+         tokens = min(seq.num_prompt
? its prompt has 10 tokens, its output 5, and 0 are computed. With a budget of 30, the plan should be [15], but with your code it is [10].
- if tokens > 0:
+ if tokens > 0 and not (plan and plan[-1][1] > 1):
? have [6, 1] tokens to compute, waiting ones []. The plan should be [6, 1], but with your code it is [6].
- for seq in running:
+ for seq in sorted(running, key=lambda seq: not seq.decoding):
? The plan has the sequences in the order [1, 0].
- running.append(seq)
+ running.insert(0, seq)
? first. Afterwards the numbers in `running` should be [0, 1, 2], but with your code it is [2, 0, 1].
- running.append(seq)
+ running.append(seq); seq.row = 0
? plan_step should not change a sequence, but it does.
- plan = []
+ (plan := plan_step.__dict__.setdefault('plan', [])).clear()
? A call of plan_step should not change an earlier plan, but it does.
filter
- (typical_p < 1)[:, None]
+ (typical_p < 1).any()
? typical_p=1 should not change the logits, but it does.
- log_probs = logits.log_softmax(dim=-1)
-     probs = log_probs.exp()
+ probs = logits.softmax(dim=-1)
+     log_probs = (probs + 1e-5).log()
? Of 50,000 random logits typical_p=0.5 should keep about
- nansum
+ sum
? be [1], but with your code it is [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19].
- before < typical_p[:, None]
+ before < typical_p.max()
? 34, 35, 36, 37, 38, 39, 40, 41, 42, 43, 44, 45, 46, 47, 48, 49, 50, 51, 52, 53, 54, 55, 56, 57, 58, 59].
-     last = ordered.gather(1, kept - 1)
-     return logits.masked_fill((distance > last)
+     late = order.argsort(dim=-1) >= kept
+     return logits.masked_fill(late
? [0.5, 0.2, 0.2, 0.1] the tokens that typical_p=0.1 keeps should be [1, 2], but with your code it is [1].
- before < typical_p[:, None]
+ before <= typical_p[:, None]
? 0.125] the tokens that typical_p=0.75 keeps should be [0, 1, 2], but with your code it is [0, 1, 2, 3, 4].
- distance = (-log_probs - entropy).abs()
+ distance = -log_probs
? [0.5, 0.2, 0.2, 0.1] the tokens that typical_p=0.3 keeps should be [1, 2], but with your code it is [0].
- logits.masked_fill(
+ logits.masked_fill_(
? The tensor of logits that your function gets must not change.
- kept = (before < typical_p[:, None]).sum(dim=-1, keepdim=True).clamp(min=1)
+ kept = 1 + (before + sorted_probs >= typical_p[:, None]).byte().argmax(-1, keepdim=True)
? p=0.99999994, the number of tokens that are kept should be 1042, but with your code it is
- typical_p < 1
+ typical_p < 0.99
? the tokens that typical_p=0.995 keeps, as in transformers,
- log_probs = logits
+ logits = logits.clamp(min=-1e4)
+     log_probs = logits
? typical_p=1 should not change the logits, but it does.
prefix
- matched: list[Block] = []
+ return super().match(seq)
? match is the task: it should not call the engine's.
- (len(seq.token_ids) - 1) //
+ len(seq.token_ids) //
? tokens of the blocks matched by [5, 6, 7, 8] should be [[5, 6]], but with your code it is [[5, 6], [7, 8]].
- hash_block(parent, token_ids)
+ hash_block(b'', token_ids)
? of the blocks matched by [5, 6, 7, 8, 9] should be [[5, 6], [7, 8]], but with your code it is [[5, 6]].
- break
+ continue
? The tokens of the blocks matched by [5, 6, 7, 8, 9] should be [], but with your code it is [[7, 8]].
- if block is None or block.token_ids != token_ids
+ if block is None
? hash here. The tokens of the blocks matched by [5, 7, 8] should be [], but with your code it is [[5, 6]].
- matched.append(block)
+ matched.append(block.block_id)
? match should return a list of Blocks, but it returns [1, 2].
- matched.append(block)
+ matched = [block]
? of the blocks matched by [5, 6, 7, 8, 9] should be [[5, 6], [7, 8]], but with your code it is [[7, 8]].
- len(seq.token_ids)
+ seq.num_prompt
? may have the same hash, should be [6, 8, 10, 12, 14, 16, 18, 20], but with your code it is [6, 8, 10, 12, 14, 16, 18].
- block.token_ids != token_ids
+ sorted(block.token_ids) != sorted(token_ids)
? hash here. The tokens of the blocks matched by [6, 5, 8] should be [], but with your code it is [[5, 6]].
- self.hash_to_block.get(parent)
+ next((b for b in self.hash_to_block.values() if b.block_hash == parent), None)
? match should look up each hash in hash_to_block, and not go through its blocks.
eviction
- def _free_all(self) -> None:
-         super()._free_all()
-         self.hits = [0] * len(self.blocks)
+ def __init__(self, *args):
+         super().__init__(*args)
+         self.hits = [0] * len(self.blocks)
+ 
+     def reset_prefix_cache(self):
+         done = super().reset_prefix_cache()
+         self.hits = [0] * len(self.blocks) if done else self.hits
+         return done
? are lost by revert(). Blocks 5 and 4 are computed, with 0 hits. Then 5 gets one. The order of eviction should be [4, 5]
- def choose_victim
+ def copy_on_write(self, seq):
+         shared, copy = self._shared_block(seq), super().copy_on_write(seq)
+         if copy is not None: self.hits[copy] = self.hits[shared.block_id]
+         return copy
+ 
+     def choose_victim
? writes another token to the copy, and caches it with 0 hits. The order of eviction should be [2, 3, 2, 1], but with your code it is [3,
- self.hits =
+ FewestHits.hits =
? another manager computes a block and resets its prefix cache. The order of eviction should be [2, 1], but with your
- self.hits[block.block_id] = 0
+ pass
? with 0 hits. Then 4 gets one. The order of eviction should be [5, 4], but with your code it is [4, 5].
- min(self.evictable, key=self.hits.__getitem__)
+ super().choose_victim()
? are computed, with 0 hits. The order of eviction should be [3, 2, 1], but with your code it is [1, 3, 2].
- += 1
+ += len(matched)
? and blocks 1 to 32 of one prompt have one each. The order of eviction should be [32, 31,
- += 1
+ += 1 + (block is matched[0])
? and block 3 has 2. The order of eviction should be [3, 2, 1], but with your code it is [2, 3, 1].
- for block in matched:
+ for block in matched if not seq.preemptions else []:
? preemption, and block 4 none. The order of eviction should be [4, 3], but with your code it is [3, 4].
- return min(self.evictable, key=self.hits.__getitem__)
+ victim = min(self.evictable, key=self.hits.__getitem__)
+         self.hits[victim] = 0
+         return victim
? with 0 hits. The order of eviction should be [3, 1, 2], but with your code it is [1, 3, 2].
- self.hits[block.block_id] += 1
+ self.hits[block.block_id] += block.ref_count
? and then block 2 gets 3 hits. The order of eviction should be [1, 2], but with your code it is [2, 1].
- self.hits = [0] * len(self.blocks)
+ self.hits = getattr(self, "hits", [0] * len(self.blocks))
? with 0 hits. Then 5 gets one. The order of eviction should be [4, 5], but with your code it is [5, 4].
preempt
- self.running[-1]
+ self.running[0]
? and sequence 0 needs 1. After _make_room, those that run should be [0, 1], but with your code it is [1, 2].
- while self
+ if self
? and sequence 0 needs 3. After _make_room, those that run should be [0], but with your code it is [0, 1, 2].
- self.block_manager.release(seq)
+ seq.block_table = []
? and sequence 0 needs 1. After _make_room, those that run should be [0, 1], but with your code it is [].
- , seq.decoding = -1, False
+  = -1
? After _make_room, seq.decoding of all should be [True, True, False], but with your code it is [True, True, True].
- self.queue(seq)
+ self.waiting.insert(0, seq); seq.status = type(seq.status).WAITING
? and then sequence 8, by self.queue(seq). The queue should be [1, 8, 7], but with your code it is [8, 1, 7].
- seq.row, seq.decoding = -1, False
+ seq.decoding = False
? and sequence 0 needs 1. After _make_room, seq.row of all should be [0, 1, -1], but with your code it is
- seq.preemptions += 1
+ seq.preemptions = 1
? needs 1. After _make_room, seq.preemptions of all should be [1, 1, 2], but with your code it is [1, 1, 1].
- self.block_manager.release(seq)
+ self.block_manager.release(seq); self.block_manager.reset_prefix_cache()
? The number of its blocks that the prefix cache still has should be 2, but with your code it is 0.
- needed and seq in self.running
+ needed and seq in self.running and len(self.running) > 1
? and sequence 0 needs 1. After _make_room, those that run should be [], but with your code it is [0].
- self.running.remove(seq)
+ self.running.pop()
? After preempt(sequence 1), those that run should be [0, 2], but with your code it is [0, 1].
- self.block_manager.release(seq)
+ seq.block_table.reverse()
+         self.block_manager.release(seq)
? the last first, should be [3, 2], but with your code it is [2, 3].
-         self.queue(seq)
+         del seq.token_ids[seq.num_prompt :]
+         self.queue(seq)
? be [[0, 0, 0, 0, 2], [1, 1, 0], [2, 2, 0]], but with your code it is [[0, 0, 0, 0, 2], [1, 1, 0], [2, 2]].
policy
- AGING * seq.arrival - (
+ -(
? of request 0 has 3 tokens. The order of admission should be [1, 0, 2], but with your code it is [1, 2, 0].
- seq.max_length - seq.num_prompt
+ seq.max_length
? of request 0 has 200 tokens. The order of admission should be [1, 0], but with your code it is [0, 1].
- AGING *
+
? of request 0 has 3 tokens. The order of admission should be [1, 0, 2], but with your code it is [1, 2, 0].
- AGING *
+ 1.0 * AGING *
? The key must be an int, but it is 15998.0.
- arrival - (
+ arrival - len(blocks.match(seq)) * blocks.block_size - (
? 15998, 15998, 15998, 15998, 15998], but with your code it is [15998, 15998, 15998, 15998, 15966, 15966].
- AGING * seq.arrival - (seq.max_length - seq.num_prompt)
+ max(0, AGING * seq.arrival - (seq.max_length - seq.num_prompt))
? Whether the key of request 1 is the smaller one should be True, but with your code it is False.
- seq.num_prompt
+ 2 * seq.num_prompt
? after prompts of 200 and 3. Their keys are [199, 3]. Whether the key of request 1 is the smaller one
- AGING * seq.arrival
+ AGING * (seq.arrival % 64)
? Whether the key of request 5
-     return
+     seq.num_candidates = 0
+     return
? The key must change nothing. The fields that it changed should be [], but with your code it is ['num_candidates'].
softmax
- torch.exp(scores - torch.where(m == -torch.inf, 0.0, m))
+ torch.exp2(1.442695 * (scores - torch.where(m == -torch.inf, 0.0, m)))
? 50 scores in float64, in tiles of 7: acc / l should be [
- weights.sum()
+ weights.sum() + 1e-9
? 50 scores in float64, in tiles of 7: acc / l should be [
- weights = torch.exp(scores - torch.where(m == -torch.inf, 0.0, m))
+ weights = torch.exp(scores - torch.where(m == -torch.inf, 0.0, m))
+     weights[weights < 1e-7] = 0
? 50 scores in float64, in tiles of 7: acc / l should be [
- first, second = torch.exp(one[0] - base), torch
+ first, second = torch.ones(()), torch
? The example: m, l, acc after tile 2 should be [3.0, 1.5, 38.71], but with your code it is [3.0, 2.37, 53.68].
- base = torch.where(m == -torch.inf, 0.0, m)
+ base = m
? Scores [-inf, -inf, 0.5, 3.0, 1.5, 1.0] in tiles of 2: acc / l should be [
- return m, one[1]
+ return one[0], one[1]
? example: m, l, acc after tile 1 should be [2.0, 1.37, 23.68], but with your code it is [-inf, 1.37, 23.68].
- torch.exp(other[0] - base)
+ torch.ones(())
? 50 scores in tiles of 1 (rising), merged from last to first: acc / l should be [
- torch.maximum(one[0], other[0])
+ other[0]
? Scores [0.0, 1000.0, 0.0, -1000.0, 999.0, 0.0] in tiles of 1: acc / l should be [
- base = torch.where(m == -torch.inf, 0.0, m)
+ base = m.clamp(min=-100)
? Scores around -1000: acc / l should be [
- weights = torch.exp(scores - torch.where(m == -torch.inf, 0.0, m))
+ weights = torch.exp(scores - m)
? Scores [-inf, -inf, 0.5, 3.0, 1.5, 1.0] in tiles of 2: acc / l should be [
-     return m, one[1] * first + other[1] * second
+     return m, one[1].mul_(first) + other[1] * second
? `update` should not change its arguments.
- return m, one[1]
+ return base, one[1]
? Scores [-inf, -inf, -999.5, -997.0, -998.5, -999.0] in tiles of 2: acc / l should be [
- m = scores.max()
+ if scores.isinf().any(): return state
+     m = scores.max()
? Scores [-inf, 2.0, 0.5, 3.0, 1.5, 1.0] in tiles of 2: acc / l should be [
- m = torch.maximum(one[0], other[0])
+ if -torch.inf in (one[0], other[0]): return other
+     m = torch.maximum(one[0], other[0])
? merged from last to first: acc / l should be [
- m = torch.maximum(one[0], other[0])
+ if one[0] == other[0]: return one
+     m = torch.maximum(one[0], other[0])
? 50 scores in tiles of 1 (with equal scores): acc / l should be [
- m = scores.max()
+ m = torch.maximum(scores[0], scores[-1])
? Scores [0.0, 1000.0, 0.0, -1000.0, 999.0, 0.0] in tiles of 3: acc / l should be [
- base = torch.where(m == -torch.inf, 0.0, m)
+ base = m.clamp(min=-1e4)
? Scores around -30000: acc / l should be [
- torch.exp(one[0] - base), torch
+ torch.exp(one[0] - base) + 1e-6, torch
? Scores [-40.0, 0.0, -13.0], values [1000000.0, 1.0, 1000000.0]: acc / l should be [
- torch.exp(scores - torch.where(m == -torch.inf, 0.0, m))
+ scores.sub_(torch.where(m == -torch.inf, 0.0, m)).exp()
? `update` should not change its arguments.
replay
- self.rows[:size] = torch.tensor(
+ self.rows = torch.tensor(
? captured: copy the rows of each step to it. The rows that are computed should be [[2]], but with your code it is [[6]].
- [self.padding_row] *
+ rows[-1:] *
? Only the row 6 is padding. The rows that are computed should be [[5, 0, 2, 6]], but with your code it is [[5, 0, 2, 2]].
- self.rows[:size] = torch.tensor(rows + [self.padding_row] * (size - len(rows)))
+ self.rows[: len(rows)] = torch.tensor(rows)
? Only the row 6 is padding. The rows that are computed should be [[4, 5, 1, 6]], but with your code it is [[4, 5, 1, 3]].
-             step(self.rows[:size])
+             pass
? is not compiled for tensors of 1 and 1 elements: launch it with such tensors before the capture
- torch.full((max(sizes),), padding_row)
+ torch.arange(max(sizes))
? runs the step for the padding row, 6. Other rows should be [], but with your code it is [0, 1, 2, 3, 4, 5].
- if size >= len(rows)
+ if size > len(rows) or size == max(self.graphs)
? is the one of size 1. The rows that are computed should be [[2]], but with your code it is [[2, 6]].
- max(sizes)
+ sizes[-1]
? (2) must match the existing size (4) at non-singleton dimension 0.  Target sizes: [2].  Tensor sizes: [4].
-         self.graphs[size]()
+         if getattr(self, 'last', None) != rows:
+             self.graphs[size]()
+         self.last = rows
? rows [[2]]: a step of [2] replays a graph. The number of launches should be 1, but with your code it is 0.
- self.tokens[size] = step(self.rows[:size])
+ self.tokens |= dict.fromkeys(range(99), step(self.rows[:size]))
? writes to the tensor that `step` returned in its capture. The output of row 2 should be [1], but with your code it is [-1].
- self.graphs, self.tokens = {}, {}
+ Replays.graphs, Replays.tokens = {}, {}
? There are two devices, each with its Replays. Sizes [1, 4], padding row 9: a step of [0, 1, 3] raises an error
- self.rows[:size] = torch.tensor(rows + [self.padding_row] * (size - len(rows)))
+ new = torch.tensor(rows + [self.padding_row] * (size - len(rows)))
+         self.rows = new if self.tokens.get(0) else self.rows.index_copy_(0, torch.arange(size), new)
+         self.tokens[0] = True
? rows of this step, in their order. The rows that are computed should be [[4, 1]], but with your code it is [[1, 4]].
- self.rows[:size] = torch.tensor(
+ if rows is not self.tokens.get(0):
+             self.tokens[0] = rows
+             self.rows[:size] = torch.tensor(
? The rows that are computed should be [[4, 1]], but with your code it is [[1, 4]].
- torch.full((max(sizes),), padding_row)
+ torch.full((max(sizes),), padding_row, dtype=torch.int32)
? The dtype of the rows that `step` gets should be torch.int64, but with your code it is torch.int32.
- self.graphs, self.tokens = {}, {}
+ self.graphs, self.tokens = {}, {}
+         sizes.sort()
? may not change its argument `sizes`, which should be [4, 6, 1, 2], but with your code it is [1, 2, 4, 6].
- self.padding_row = padding_row
+ self.padding_row = padding_row = max(sizes)
? The constructor runs the step for the padding row, 9. Other rows should be [], but with your code it is [6].
- self.rows[:size] = torch.tensor(
+ last, self.last = getattr(self, 'last', []), rows[:]
+         if rows != last[:len(rows)]: self.rows[:size] = torch.tensor(
? Only the row 6 is padding. The rows that are computed should be [[1, 4, 5, 6]], but with your code it is [[1, 4, 5, 2]].
- self.padding_row = padding_row
+ Replays.padding_row = padding_row
? There are two devices, each with its Replays. Sizes [1, 4], padding row 9: a step of [0, 1, 3] replays a graph. Only the row 9
ngram
- known[end - size : end] == known[-size:]
+ known[end - 1] == known[-1]
? The drafts after [1, 2, 9, 3, 2, 8, 1, 2], with size=2, most=1, should be [9], but with your code it is [8].
-     number = 0
-     while number < len(drafts) and drafts[number] == drawn[number]:
-         number += 1
+     number = sum(a == b for a, b in zip(drafts, drawn))
? Drafts [3, 4], and [8, 4, 5] are drawn: what is kept should be [8], but with your code it is [8, 4].
- drawn[: number + 1]
+ drawn[: number + 2]
? 4, 1], and [3, 4, 7, 9] are drawn: what is kept should be [3, 4, 7], but with your code it is [3, 4, 7, 9].
- range(len(known) - 1, size - 1, -1)
+ range(size, len(known))
? The drafts after [1, 2, 8, 1, 2, 9, 1, 2], with size=2, most=1, should be [9], but with your code it is [8].
- range(len(known) - 1,
+ range(len(known),
? The drafts after [5, 1, 2, 3, 4, 1, 2], with size=2, most=3, should be [3, 4, 1], but with your code it is [].
- return known[end : end + most]
+ return (known[end:] * most)[:most]
? 1, 2], with size=2, most=9, should be [3, 4, 1, 2], but with your code it is [3, 4, 1, 2, 3, 4, 1, 2, 3].
-         computed = len(known)
+         computed += len(drawn)
? [2, 3, 1])]. The last begins at position 12, but only the positions before 9 are computed.
- computed += len(kept) - 1
+ pass
? code it is [(0, [1, 2, 3, 1, 2]), (5, [3, 1, 2, 3]), (6, [1, 2, 3, 1, 2, 3, 1]), (10, [2, 3, 1, 2, 3, 1])].
- left - 1)
+ left)
? but with your code it is [(0, [1, 2, 3, 1, 2]), (5, [3, 1, 2, 3]), (9, [1, 2, 3, 1]), (13, [2, 3, 1, 2])].
- token in ends or 
+
? 1])]. The output, as without drafts, should be [3, 9], but with your code it is [3, 9, 1, 2, 3, 9, 1, 2].
-         for token in kept:
-             known.append(token)
-             if token in ends or len(known)
+         known += kept
+         for token in kept[-1:]:
+             if token in ends or len(known)
? 1, 2, 3])]. The output, as without drafts, should be [3, 9], but with your code it is [3, 9, 1, 2, 3, 9].
- propose(known, size,
+ propose(prompt, size,
? 3, 1, 2]), (6, [1, 3, 1, 2]), (7, [2, 3, 1, 2]), (11, [3, 3, 1, 2]), (12, [1, 3, 1, 2]), (13, [2, 3, 1])].
- known[end - size : end] == known[-size:]
+ set(known[end - size : end]) == set(known[-size:])
? The drafts after [1, 2, 1, 2, 1], with size=3, most=5, should be [2, 1], but with your code it is [1].
- computed += len(kept) - 1
+ computed += len(drafts)
? (6, [])]. The last has no tokens. Too many known ones count as computed: a wrong draft does not compute
-     for end in range(
+     size = min(size, len(known) - 1)
+     for end in range(
? The drafts after [1, 1], with size=3, most=3, should be [], but with your code it is [1].
-     for end in range(
+     known = known[-100:]
+     for end in range(
? The drafts should be [7, 10, 11], but with your code it is [].
m1
- start, ids = start + len(ids), output[-1:]
+ start, ids = start, output[-1:]
? Step 2 computes the tokens '1' at position 0, where no request has it.
- caches = [KVCache(c.num_kv_heads, c.head_dim) for _ in range(c.num_layers)]
+ kept = [KVCache(c.num_kv_heads, c.head_dim) for _ in range(c.num_layers)]
+         caches = self.__dict__.setdefault('kept', kept)
? One question alone is right: look at what is left of the one before.
- output[-1] in ends or 
+
? transformers answers 'What is 12 + 30?\n' (request 0) with '12 + 30 = 42<|endoftext|>', and your engine with
- start, ids = start + len(ids), output[-1:]
+ start, ids = 0, prompt + output
+             caches[:] = [KVCache(c.num_kv_heads, c.head_dim) for _ in caches]
? If each token is computed once, and the last one never, the computed tokens should be 20, but with your code it is
- len(output) == max_tokens
+ len(output) > max_tokens
? new tokens, and may have
- for _ in range(c.num_layers)]
+ for _ in range(1)] * c.num_layers
? the answers are right by chance. Step 1 computes the tokens 0 to 9 of request 0. This is the first step with wrong logits
m2
-         cache = KVCache(*k.shape[1:])
-         if old:
-             cache.attend(q.new_zeros(len(old), *q.shape[1:]), *self.kv[layer][:, old])
+         cache = self.__dict__.setdefault((seq, layer), KVCache(*k.shape[1:]))
? self.kv is erased before step 2, which should change its logits, and does not.
- slots(seq.block_table, self.size, 0
+ slots(sorted(seq.block_table), self.size, 0
? The slots of self.kv that are written, for all tokens but the last, should be
-         if ended:
+         if seq.token_ids[-1] in seq.stop_token_ids:
? have ended. The blocks that are available again should be 64, but with your code it is
- slots(seq.block_table, self.size, 0, seq.num_computed)
+ list(range(self.size, self.size + seq.num_computed))
? The slots of self.kv that are written, for all tokens but the last, should be
- self.blocks.release(seq)
+ pass
? have ended. The blocks that are available again should be 64, but with your code it is 62.
- if old:
+ if len(old) > 16:
? This is the first step with wrong logits, of request 0 at position
- self.take_blocks(seq, end - start)
+ self.take_blocks(seq, seq.max_length - start)
? the blocks of 16 slots that each step owns should be [1, 1, 2, 2, 2, 2], but with your code it is [2, 2, 2, 2, 2, 2].
m3
- self.take_blocks(seq, count)
+ self.take_blocks(seq, len(seq.token_ids) - seq.num_computed)
? in chunks of 16: the blocks of 16 slots that each step owns should be [1, 2, 3], but with your code it is [3, 3, 3].
- logits[last]
+ logits[-len(plan) :]
? All logits before are right: look at what is planned and sampled.
- if seq.num_computed == len(seq.token_ids):
+ if True:
? The same with a budget of 64 is right: look at chunks.
- self.advance(seq, end)
+ self.advance(seq, max(end, seq.num_prompt))
? The same with a budget of 64 is right: look at chunks.
- plan_step(self.running, self.waiting,
+ plan_step(self.running, [] if self.running else self.waiting,
? steps of all should be 10, but with your code it is
m4
-         self.blocks.cache_full_blocks(seq)
+ 
+     def end(self, seq):
+         self.blocks.cache_full_blocks(seq)
+         super().end(seq)
? The second is admitted in step 2, while the first runs. The tokens that both compute should be
- self.blocks.cache_full_blocks(seq)
+ pass
? other. The tokens that the second computes should be
- Blocks(Matching, FewestHits)
+ Blocks(Matching)
? are not evicted first. The tokens that the next chat computes should be 1, but with your code it is 33.
- self.running[admitted:]:
+ [*self.running[admitted:], *self.waiting]:
? have ended. The blocks that are available again should be 64, but with your code it is
m5
- self.running.pop()
+ self.running.pop(0)
? Requests of 14, 14 and 13 tokens, for 12 more, in 3 blocks of 16 slots.
- self.waiting.insert(0, last)
+ self.waiting.append(last)
? waits at the head. A block of its first 16 tokens is cached. The first position that step 13 computes should be 16
- if self.make_room(seq, count):
+ if self.make_room(seq, count) or True:
? Requests of 14, 14 and 13 tokens, for 12 more, in 3 blocks of 16 slots.
- self.blocks.release(last)
+ pass
? Requests of 14, 14 and 13 tokens, for 12 more, in 3 blocks of 16 slots.
m6
- Iterator[tuple[int, str]]:
+ Iterator[tuple[int, str]]:
+         return iter([*self.every(prompts, max_tokens, ends, stops, as_bytes)])
+ 
+     def every(self, prompts, max_tokens, ends, stops, as_bytes):
? The steps when it yields the first text should be 1, but with your code it is
-             for seq in list(self.running):
-                 self.end(seq)
+             pass
? is closed after the first text. The blocks that are available again should be 64, but with your code it is
- new += text.finish()
+ pass
? The streamed text of request
- if token in ends else
+ if False else
? should be '12 + 30 = 42', but with your code it is '12 + 30 = 42<|endoftext|>'.
- if text.ended and seq in self.running:
+ if False:
? The steps should be
- if new:
+ if True:
? `stream` yields an empty text of request
- {seq: StopStream(stops) for seq in self.add(prompts, max_tokens, ends)}
+ dict.fromkeys(self.add(prompts, max_tokens, ends), StopStream(stops))
? The streamed text of request
"""


def read(text: str) -> dict[str, list[tuple[str, str, str]]]:
    """Return for each task (text, what replaces it, a part of the message)."""
    wrong, parts = dict[str, list[tuple[str, str, str]]](), {"-": list[str](), "+": list[str]()}
    for line in text.strip().splitlines():
        if line[0] in parts:
            parts[line[0]].append(line[2:])
        elif line[0] == "?":
            wrong[[*wrong][-1]].append(("\n".join(parts["-"]), "\n".join(parts["+"]), line[2:]))
            parts = {"-": [], "+": []}
        else:
            wrong[line] = []
    return wrong


WRONG = read(TEXT)
