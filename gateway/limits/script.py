"""``policies.admission`` once more, in Lua, over gauges that lie in Redis: one round trip, all or nothing.

A window is a hash: ``slot number -> amount``, ``total``, ``first`` (the slot before which everything has been
forgotten) and ``last`` (the newest slot that has something). Leases are a sorted set, request id by the instant at
which it ends. A purse is a hash of ``spent``, ``held`` and each request's ``h:id``, with such a set beside it. All
numbers are integers below 2**53, where doubles are exact. Time is Redis's own, so gateways whose clocks differ count
alike; tests name it.
"""

from __future__ import annotations

from gateway.redis import Script

_GAUGES = """
local NUM_SLOTS, LEASE_MS, BUSY_RETRY_MS, NO_CEILING = 60, 60000, 1000, 2 ^ 53
local now = tonumber(ARGV[1])
if now == 0 then
  local time = redis.call('TIME')
  now = time[1] * 1000 + math.floor(time[2] / 1000)
end

local function until_of(key) return key .. ':until' end

local function load_window(gauge)
  local head = redis.call('HMGET', gauge.key, 'total', 'first', 'last')
  gauge.slot = math.floor(now / gauge.slot_ms)
  gauge.total = tonumber(head[1]) or 0
  gauge.first, gauge.last = tonumber(head[2]), tonumber(head[3])
  local keep = gauge.slot - NUM_SLOTS
  if gauge.total == 0 or keep <= gauge.first then return end
  local names = {}
  if keep - gauge.first <= NUM_SLOTS then
    for slot = gauge.first, keep - 1 do names[#names + 1] = slot end
    for _, amount in ipairs(redis.call('HMGET', gauge.key, unpack(names))) do
      if amount then gauge.total = gauge.total - amount end
    end
  else
    gauge.total = 0
  end
  if gauge.total == 0 then
    redis.call('DEL', gauge.key)
  else
    redis.call('HDEL', gauge.key, unpack(names))
    redis.call('HSET', gauge.key, 'total', gauge.total, 'first', keep)
    gauge.first = keep
  end
end

local function add_to_window(gauge, amount)
  if amount == 0 then return end
  local slot = gauge.slot
  if gauge.total == 0 then
    gauge.first = slot
  elseif gauge.last > slot then
    slot = gauge.last
  end
  gauge.total, gauge.last = gauge.total + amount, slot
  redis.call('HINCRBY', gauge.key, slot, amount)
  redis.call('HSET', gauge.key, 'total', gauge.total, 'first', gauge.first, 'last', slot)
  redis.call('PEXPIRE', gauge.key, gauge.keep_ms)
end

local function add_before(gauge, amount, ago_ms)
  local slot = math.floor((now - ago_ms) / gauge.slot_ms)
  if slot < gauge.slot - NUM_SLOTS then return end
  if gauge.total == 0 then gauge.first, gauge.last = slot, slot end
  gauge.first, gauge.last = math.min(gauge.first, slot), math.max(gauge.last, slot)
  gauge.total = gauge.total + amount
  redis.call('HINCRBY', gauge.key, slot, amount)
  redis.call('HSET', gauge.key, 'total', gauge.total, 'first', gauge.first, 'last', gauge.last)
  redis.call('PEXPIRE', gauge.key, gauge.keep_ms)
end

local function give_back(gauge, amount, added_at)
  local slot = math.floor(added_at / gauge.slot_ms)
  if gauge.total == 0 or slot < gauge.first then return end
  local held = tonumber(redis.call('HGET', gauge.key, slot))
  if not held then return end
  amount = math.min(amount, held)
  gauge.total = gauge.total - amount
  if gauge.total == 0 then
    redis.call('DEL', gauge.key)
    return
  end
  redis.call('HSET', gauge.key, 'total', gauge.total)
  if held > amount then
    redis.call('HSET', gauge.key, slot, held - amount)
    return
  end
  redis.call('HDEL', gauge.key, slot)
  if slot < gauge.last then return end
  repeat slot = slot - 1 until redis.call('HEXISTS', gauge.key, slot) == 1
  gauge.last = slot
  redis.call('HSET', gauge.key, 'last', slot)
end

local function window_wait(gauge, excess)
  local names = {}
  for slot = gauge.first, gauge.last do names[#names + 1] = slot end
  for index, amount in ipairs(redis.call('HMGET', gauge.key, unpack(names))) do
    if amount then
      excess = excess - amount
      if excess <= 0 then return (names[index] + NUM_SLOTS + 1) * gauge.slot_ms - now end
    end
  end
  return 0
end

local function load_leases(gauge)
  redis.call('ZREMRANGEBYSCORE', gauge.key, '-inf', now)
  gauge.total = redis.call('ZCARD', gauge.key)
end

local function hold_lease(gauge, id)
  redis.call('ZADD', gauge.key, now + LEASE_MS, id)
  redis.call('PEXPIRE', gauge.key, gauge.keep_ms)
  gauge.total = gauge.total + 1
end

local function drop_hold(gauge, id)
  local held = tonumber(redis.call('HGET', gauge.key, 'h:' .. id))
  redis.call('ZREM', until_of(gauge.key), id)
  if held then
    redis.call('HDEL', gauge.key, 'h:' .. id)
    redis.call('HINCRBY', gauge.key, 'held', 0 - held)  -- Redis takes no -0
  end
end

local function keep_purse(gauge)
  redis.call('PEXPIRE', gauge.key, gauge.keep_ms)
  redis.call('PEXPIRE', until_of(gauge.key), gauge.keep_ms)
end

local function load_purse(gauge)
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', until_of(gauge.key), '-inf', now)) do drop_hold(gauge, id) end
  local head = redis.call('HMGET', gauge.key, 'spent', 'held')
  gauge.spent = tonumber(head[1]) or 0
  if gauge.spent < gauge.known then
    gauge.spent = gauge.known
    redis.call('HSET', gauge.key, 'spent', gauge.known)
    keep_purse(gauge)
  end
  gauge.total = gauge.spent + (tonumber(head[2]) or 0)
end

local function hold_money(gauge, id, amount)
  redis.call('HINCRBY', gauge.key, 'h:' .. id, amount)
  redis.call('HINCRBY', gauge.key, 'held', amount)
  redis.call('ZADD', until_of(gauge.key), now + LEASE_MS, id)
  keep_purse(gauge)
  gauge.total = gauge.total + amount
end

local function load_gauges(first_argument)
  local gauges = {}
  for index, key in ipairs(KEYS) do
    local at = first_argument + 5 * (index - 1)
    local gauge = {key = key, kind = ARGV[at], ceiling = tonumber(ARGV[at + 1]), slot_ms = tonumber(ARGV[at + 2]),
                   keep_ms = tonumber(ARGV[at + 3]), known = tonumber(ARGV[at + 4])}
    if gauge.kind == 'concurrent' then load_leases(gauge)
    elseif gauge.kind == 'money' then load_purse(gauge)
    else load_window(gauge) end
    gauges[index] = gauge
  end
  return gauges
end

local function tell(gauges, told)
  for _, gauge in ipairs(gauges) do
    told[#told + 1] = gauge.total
    local other = 0
    if gauge.kind == 'money' then other = gauge.total - gauge.spent
    elseif gauge.slot_ms > 0 and gauge.total > 0 then other = (gauge.last + NUM_SLOTS + 1) * gauge.slot_ms - now end
    told[#told + 1] = other
  end
  return told
end
"""

TAKE = Script(
    _GAUGES
    + """
local id, least_tokens, most_tokens = ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local least_micros, most_micros = tonumber(ARGV[5]), tonumber(ARGV[6])
local gauges = load_gauges(7)
local tokens, micros, fits = most_tokens, most_micros, true
for _, gauge in ipairs(gauges) do
  local room = math.max(gauge.ceiling - gauge.total, 0)
  if gauge.kind == 'tokens' then
    fits = fits and room >= least_tokens
    tokens = math.min(tokens, room)
  elseif gauge.kind == 'money' then
    fits = fits and room >= least_micros
    micros = math.min(micros, room)
  else
    fits = fits and room >= 1
  end
end
if not fits then
  local worst, longest = 0, -1
  for index, gauge in ipairs(gauges) do
    local need = 1
    if gauge.kind == 'tokens' then need = least_tokens elseif gauge.kind == 'money' then need = least_micros end
    local excess = gauge.total + need - gauge.ceiling
    if need > 0 and excess > 0 then
      if gauge.kind == 'money' and gauge.spent + need > gauge.ceiling then
        worst, longest = index, 0
        break
      end
      local wait = BUSY_RETRY_MS
      if gauge.slot_ms > 0 then
        wait = 0
        if gauge.total > 0 then wait = window_wait(gauge, math.min(excess, gauge.total)) end
      end
      if wait > longest then worst, longest = index, wait end
    end
  end
  return tell(gauges, {0, now, worst - 1, longest})
end
for _, gauge in ipairs(gauges) do
  if gauge.kind == 'tokens' then add_to_window(gauge, tokens)
  elseif gauge.kind == 'requests' then add_to_window(gauge, 1)
  elseif gauge.kind == 'concurrent' then hold_lease(gauge, id)
  elseif gauge.ceiling < NO_CEILING then hold_money(gauge, id, micros) end
end
return tell(gauges, {1, now, tokens, micros})
"""
)
"""Arguments: now, request id, least and most tokens, least and most money; then each rule's kind, ceiling, slot and
keeping time, and what is known to be spent of its budget. Returns 1, now, tokens, money, or 0, now, rule, wait; then
the readings."""

SETTLE = Script(
    _GAUGES
    + """
local id, overused, cost, num_unused = ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local spent = {}
for _, gauge in ipairs(load_gauges(6 + 2 * num_unused)) do
  if gauge.kind == 'concurrent' then
    redis.call('ZREM', gauge.key, id)
  elseif gauge.kind == 'money' then
    drop_hold(gauge, id)
    spent[#spent + 1] = gauge.spent + cost
    redis.call('HSET', gauge.key, 'spent', gauge.spent + cost)
    keep_purse(gauge)
  elseif gauge.kind == 'tokens' then
    add_to_window(gauge, overused)
    for at = 6, 5 + 2 * num_unused, 2 do give_back(gauge, tonumber(ARGV[at + 1]), tonumber(ARGV[at])) end
  end
end
return spent
"""
)
"""Arguments: now, request id, tokens used beyond the grants, cost, number of grants with something unused, each one's
instant and amount; then the rules as above, as it was before. Returns what is spent of each budget."""

READ = Script(_GAUGES + "return tell(load_gauges(2), {})")
"""Arguments: now, then the rules. Returns the readings."""

ADD = Script(
    _GAUGES
    + """
local gauge = load_gauges(3)[1]
if not redis.call('SET', gauge.key .. ':told:' .. ARGV[2], 1, 'NX', 'PX', gauge.keep_ms) then return end
for at = 8, #ARGV, 2 do add_before(gauge, tonumber(ARGV[at + 1]), tonumber(ARGV[at])) end
"""
)
"""Arguments: now, an id of this telling, which counts once, one window's rule, then the milliseconds ago and the amount
of each thing that was let in elsewhere."""

RENEW = Script(
    _GAUGES
    + """
local gauge = load_gauges(2)[1]
local leases = gauge.key
if gauge.kind == 'money' then leases = until_of(gauge.key) end
for index = 7, #ARGV do redis.call('ZADD', leases, 'XX', now + LEASE_MS, ARGV[index]) end
redis.call('PEXPIRE', leases, gauge.keep_ms)
"""
)
"""Arguments: now, one rule, then the ids of requests that are still open."""

HOLD = Script(
    _GAUGES
    + """
local gauge = load_gauges(2)[1]
for at = 7, #ARGV, 2 do
  local id, amount = ARGV[at], tonumber(ARGV[at + 1])
  if gauge.kind == 'concurrent' then hold_lease(gauge, id)
  else hold_money(gauge, id, math.max(0, amount - (tonumber(redis.call('HGET', gauge.key, 'h:' .. id)) or 0))) end
end
"""
)
"""Arguments: now, one rule, then the id of each request that is open, which this may not know, and the money that it
holds at least: from now on as if it had been let in here."""

RESTORE = Script(_GAUGES + "load_gauges(2)")
"""Arguments: now, then the budget's rule, of which the ledger knows what is spent."""

RESTORE_WINDOW = Script(
    _GAUGES
    + """
local gauge = load_gauges(2)[1]
for at = 7, #ARGV, 2 do
  local slot, amount = math.min(tonumber(ARGV[at]), gauge.slot), tonumber(ARGV[at + 1])
  local lacks = amount - (tonumber(redis.call('HGET', gauge.key, slot)) or 0)
  if lacks > 0 then add_before(gauge, lacks, now - slot * gauge.slot_ms) end
end
"""
)
"""Arguments: now, then one window's rule, and the number of each slot with what the ledger knows of it."""
